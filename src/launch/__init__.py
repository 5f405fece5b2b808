"""Commands that train, serve and evaluate: their plan, their processes, and supervision.

Each part imports only parts below it, as folders of `src/` do:

    main
    branches/
    commands
    supervisor, roles, slurm/
    plan/
    jobs/
    supervise/, display
    ray/, attempt, exit_report
    memory, start, preemption
    needs
"""
