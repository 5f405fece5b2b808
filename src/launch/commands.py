"""What commands do once their plan is made: it is begun, and seen through.

Everything that can be wrong is checked before anything is started or written: by the steps of the plan.
"""

from pathlib import Path
from typing import Any

from cairn.config.ckpt import CkptConfig
from cairn.config.kinds import KINDS
from cairn.launch.attempt import begin, restore_roles
from cairn.launch.exit_report import after_failure
from cairn.launch.jobs.background import JOBS
from cairn.launch.jobs.export import set_exports_aside
from cairn.launch.jobs.sinks import finish_sinks, sinks_beside
from cairn.launch.memory import refuse_what_can_not_be_served
from cairn.launch.plan.dry_run import report
from cairn.launch.plan.remote_start import replaced
from cairn.launch.plan.run_plan import RunPlan, again, make
from cairn.launch.plan.steps import STEPS
from cairn.launch.roles import RoleStart, run_orchestrator
from cairn.launch.start import StartDamaged, damaged_start
from cairn.launch.supervisor import run_roles
from cairn.orchestrator.policy_sync.following import AttemptOver
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError, UsageError
from cairn.run.exits import EXIT_STOPPED, PolicyAltered, RoleFailed
from cairn.run.machine import use_gpus


def start(command: str, config: Any) -> int:
    """Any command that has a plan: make it, and do it, or show it if it is a dry run; returns the exit code.

    Raises:
        UsageError: the command can't start like this; nothing was written, and nothing goes on.
        ServerUnavailable: no server answers at a given address.
        RoleFailed: a role died.
    """
    plan = make(command, config, STEPS)
    if plan.dry:
        return report(plan)
    if command in KINDS:
        return _finish(plan) if plan.complete else _run(plan)
    return {"orchestrator": _orchestrate, "inference": _serve, "eval": _evaluate}[command](plan)


def _finish(plan: RunPlan) -> int:
    """What a complete run still lacks."""
    config, first = plan.config, plan.first
    assert first.manifest is not None
    for job in JOBS.values():
        job.finish(config, first.manifest.run_id)
    finish_sinks(config)
    restore_roles(config, first, plan.command)
    print(plan.complete, flush=True)
    return 0


def _run(plan: RunPlan) -> int:
    """Run the roles to the end; if they find damage, begin another attempt by another plan.

    That is a checkpoint, before which the next attempt begins, or a policy that was published: then the
    attempt begins from the newest checkpoint, unless the same step's policy was damaged before.
    """
    run = plan.config.run_directory()
    altered_at = -1
    try:
        while True:
            for note in plan.notes:
                print(note, flush=True)
            config, first = plan.config, plan.first
            attempt = begin(run, config, first, plan.recipe, command=plan.command)
            set_exports_aside(config, first, f"before_attempt_{attempt.number}")
            try:
                with sinks_beside(run, config, attempt) as take:
                    return take(run_roles(run, plan, attempt))
            except StartDamaged as damaged:
                _say_damage(plan, damaged)
                if run.stop_requested():
                    print("stopped; --ckpt.resume auto resumes from the newest good one", flush=True)
                    return EXIT_STOPPED
                plan = _after(plan, damaged)
            except PolicyAltered as altered:
                newest = next((row["step"] for row in reversed(run.metrics.rows())), 0)
                if not config.ckpt or newest <= altered_at:
                    raise RoleFailed(str(altered)) from None
                print(f"{altered}; going on from the newest checkpoint", flush=True)
                altered_at = newest
                plan = _after(plan)
    except RoleFailed as error:
        if run.has_moved():
            raise
        raise type(error)(f"{error}\nnext: {after_failure(run)}") from error
    finally:
        if plan.early is not None:
            plan.early.close()
        run.unlock()


def _say_damage(plan: RunPlan, damaged: StartDamaged) -> None:
    first = plan.first
    if damaged.folder != first.folder:
        print(f"the trainer died, and its newest checkpoint is damaged: {damaged}", flush=True)
    elif first.away:
        print(f"reading step {first.step} in the object store failed: {damaged}", flush=True)
    else:
        print(f"the checkpoint of step {first.step} is damaged: {damaged}", flush=True)


def _after(plan: RunPlan, damaged: StartDamaged | None = None) -> RunPlan:
    """The plan for an attempt after one that has found damage.

    A step that the user has named is either replaced by the remote one, or that is the end.

    Args:
        damaged: the checkpoint that is; None: the newest one is good.

    Raises:
        UsageError: there is nothing else to start from.
        RoleFailed: likewise, after the run has gone on from its start.
    """
    first, config = plan.first, plan.settled
    at_start = damaged is not None and damaged.folder == first.folder
    named = at_start and first.named
    try:
        if not named:
            config = config.sharing(ckpt=(config.ckpt or CkptConfig()).resuming_by_itself())
        still = None if damaged is None or replaced(config, damaged.folder) else damaged
        if still and named:
            raise damaged_start(still)
        return again(plan, "start", STEPS, config=config, settled=config, damaged=still, away=None)
    except UsageError as error:
        if at_start:
            raise
        raise RoleFailed(str(error)) from None


def _orchestrate(plan: RunPlan) -> int:
    """Serve the trainer that runs in the same output folder, and the next one when its attempt is over."""
    run = RunDirectory(plan.given.output_dir)
    while True:
        attempt = plan.attempt
        assert attempt is not None
        turn = RoleStart("orchestrator", run)
        try:
            return run_orchestrator(
                plan.config, attempt, plan.config.run_directory(), turn, at_once=_interrupt
            )
        except AttemptOver as over:
            print(over, flush=True)
        except PolicyAltered as altered:
            raise CairnError(f"{altered}. Start the trainer again, with --ckpt.resume auto") from None
        plan = again(plan, "attempt", STEPS)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _serve(plan: RunPlan) -> int:
    from cairn.inference.server import run as serve

    use_gpus(plan.config.gpus)
    return serve(plan.config, plan.model)


def _evaluate(plan: RunPlan) -> int:
    from cairn.evaluate.evaluate import EvalPlan, evaluate

    config = plan.config

    def check(model: Path) -> None:
        if plan.vllm == "gpu":
            refuse_what_can_not_be_served(str(model), config.inference, plan.machine, "--inference.")

    if plan.own_server:
        use_gpus(config.inference.gpus)
    return evaluate(EvalPlan(config, plan.policies, check))
