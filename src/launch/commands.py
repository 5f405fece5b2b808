"""What `sft`, `rl`, `trainer` and `orchestrator` do after their configuration is read.

Everything that can be wrong is checked before anything is started or written.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from cairn.config.ckpt import CkptConfig
from cairn.config.inference import InferenceConfig
from cairn.config.kinds import KINDS, RunConfig, RunKind
from cairn.config.model import ModelConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.rl import RLConfig
from cairn.inference.build import installed_build, serves_on_gpus
from cairn.launch.attempt import begin, restore_roles
from cairn.launch.jobs.export import finish_exports, refuse_conflicts, set_exports_aside, with_exports
from cairn.launch.jobs.upload import finish_uploads
from cairn.launch.plan.colocation import share_memory
from cairn.launch.plan.environments import Checked, check_orchestrator, facts_of
from cairn.launch.plan.external_servers import check_bases, context_of, gpus_of_servers, with_servers
from cairn.launch.plan.gpu_assignment import check_torch, placed, torch_without_cuda
from cairn.launch.plan.memory_check import refuse_what_can_not_be_served, refuse_what_does_not_fit
from cairn.launch.plan.model import model_to_serve, resolve_model
from cairn.launch.plan.other_models import Teachers, with_models_beside
from cairn.launch.plan.preflight import preflight
from cairn.launch.plan.recipe import finish_recipe, join_recipe, plan_recipe
from cairn.launch.plan.remote_start import replaced, with_remote
from cairn.launch.plan.settings import settle, with_ratings, with_steps
from cairn.launch.plan.start import Start, StartDamaged, choose_start, damaged_start, ended_early, is_complete
from cairn.launch.preemption import asking
from cairn.launch.ray.gpus import cluster_of
from cairn.launch.roles import RoleStart, run_orchestrator
from cairn.launch.supervise.supervisor import run_roles
from cairn.orchestrator.following import AttemptOver
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.exits import EXIT_STOPPED, RoleFailed
from cairn.run.file_system import remarks
from cairn.run.machine import this_machine
from cairn.run.output import start_logging
from cairn.run.waiting import wait_for
from cairn.trainer.tracking import check_login

CONVERTED = "converted"
"""Name of the folder in the run directory for a model whose weights came in another program's format."""


def start(command: str, config: RunConfig) -> int:
    """`sft`, `trainer` and `rl`: start or resume a run and see it through; returns the exit code.

    Raises:
        UsageError: the run can't start like this; nothing was started or written.
        ServerUnavailable: no server answers at a given address.
        RoleFailed: a role died.
    """
    kind = KINDS[command]
    lengths: list[str] = []
    config = with_steps(kind, config, lengths.append)
    orchestrator: Checked | None = None
    if "orchestrator" in kind.roles:
        orchestrator = check_orchestrator(kind.of("orchestrator", config))
    check_login(kind.trainer(config))
    if own_loss := kind.trainer(config).own_loss:
        from cairn.trainer.losses import make_loss  # imports torch; other runs need not wait for that

        make_loss(own_loss, kind.trainer(config).kl_in_loss)
    optimizers = [kind.trainer(config).optimizer]
    optimizers += [one.optimizer for one in kind.trainer(config).models_beside.values()]
    if any(one.is_own for one in optimizers):
        from cairn.trainer.optimizers import check_optimizer  # likewise

        for optimizer in optimizers:
            check_optimizer(optimizer)
    if config.preemption:
        asking(config.preemption)
    config = with_exports(with_ratings(config))
    config, away = with_remote(config, kind.parts)
    chosen = choose_start(config, needs=kind.parts, away=away)
    refuse_conflicts(config, chosen)
    if is_complete(config, chosen):
        if missing := finish_exports(config):
            raise RoleFailed(f"the run is complete, but not all of it could be exported: {missing}")
        assert chosen.manifest is not None, "a complete run has a last step"
        finish_uploads(config, chosen.manifest.run_id)
        restore_roles(config, chosen, command)
        complete = (
            f"the run is complete: {chosen.folder} is step {chosen.step} of --max-steps {config.max_steps}; "
            "give a larger --max-steps to continue"
        )
        print(ended_early(config, chosen) or complete, flush=True)
        return 0
    serves = "inference" in kind.roles and not cast(RLConfig, config).orchestrator.inference_url
    machine, vllm = this_machine(), installed_build() if serves else "gpu"
    taken: dict[str, str] = {}
    if machine.has_gpus and "inference" in kind.roles:
        taken = gpus_of_servers(cast(RLConfig, config), machine)
    config, placing = placed(kind, config, machine, vllm, taken)
    check_torch(placing, torch_without_cuda())
    trainer = kind.trainer(config)
    cluster = cluster_of(trainer) if trainer.ray.address else None
    if cluster and not cluster.has_gpus and trainer.gpus is None:
        print(
            f"the Ray cluster at {trainer.ray.address} has no GPU: the ranks compute on its CPUs", flush=True
        )
        # A node with GPUs that joins later would compute with settings that are settled for CPUs.
        on_cpus = trainer.model_copy(update={"gpus": "0", "workers": trainer.ranks})
        config = kind.with_trainer(config, on_cpus)
    ranks = cluster or placing.of_ranks(machine)
    config, _ = settle(config, ranks, gpu_servers=serves_on_gpus())
    recipe = plan_recipe(kind, config, chosen, orchestrator and orchestrator.recipe)
    if words := placing.in_words():
        print(words, flush=True)
    if machine.has_gpus and serves and vllm == "cpu":
        print("the server computes on the CPU, for which the installed build of vLLM is made", flush=True)
    roles = list(kind.roles)
    if "inference" in roles:
        config, roles = with_servers(cast(RLConfig, config), roles)

    def fitted(config: RunConfig, model: str) -> RunConfig:
        if cluster is None:
            refuse_what_does_not_fit(model, kind.trainer(config), ranks, kind.flags("trainer"))
        if "inference" in roles:
            server: InferenceConfig = kind.of("inference", config)
            serving = dataclasses.replace(machine, gpus=placing.server)
            refuse_what_can_not_be_served(model, server, serving, kind.flags("inference"))
        elif "inference" in kind.roles:
            check_bases(cast(RLConfig, config), model)
        if placing.colocate and placing.trainer:
            config, shares = share_memory(cast(RLConfig, config), model, placing.of_ranks(machine))
            if shares.warning:
                print(f"warning: {shares.warning}", flush=True)
        return config

    return _see_through(kind, config, chosen, recipe, roles, orchestrator, fitted, lengths)


def _see_through(
    kind: RunKind,
    config: RunConfig,
    chosen: Start,
    recipe: dict[str, Any],
    roles: list[str],
    orchestrator: Checked | None,
    fitted: Callable[[RunConfig, str], RunConfig],
    notices: list[str],
) -> int:
    """Run the roles to the end; if they find a checkpoint damaged, begin another attempt.

    Args:
        fitted: called with the model's folder before anything is started; gives the settings with each
            role's share of memory, or refuses what does not fit.
        notices: lines for the user, told once nothing refuses the run any more.
    """
    run = config.run_directory()
    for remark in remarks([run.path, run.checkpoints]):
        print(remark, flush=True)
    model, asked = config.model, kind.trainer(config).teachers
    try:
        while True:
            name = (
                str(model_to_serve(chosen.folder, kind.trainer(config).lora))
                if chosen.folder
                else resolve_model(model, run.path / CONVERTED)
            )
            config = config.sharing(model=ModelConfig(name=name))
            config = with_models_beside(kind, config, chosen, run.path / CONVERTED)
            goes_on = config.ckpt is not None and config.ckpt.resume == "auto"
            teachers = Teachers(model, chosen, kind.flags("trainer"), run.path / CONVERTED)
            sources = teachers.settle(kind.trainer(config), Path(name), recipe["trainer"])
            config = kind.with_sources(config, sources)
            config = fitted(config, name)
            found = preflight(kind, config, Path(name), _facts(config, orchestrator, roles))
            if found.errors:
                raise UsageError("\n".join(found.errors))
            for notice in [*notices, *found.notices]:
                print(notice, flush=True)
            notices.clear()
            finish_recipe(recipe, Path(name), chosen, run, goes_on=goes_on)
            attempt = begin(run, config, chosen, recipe, command=kind.command)
            set_exports_aside(config, chosen, f"before_attempt_{attempt.number}")
            try:
                return run_roles(run, attempt, roles, config)
            except StartDamaged as damaged:
                at_start = damaged.folder == chosen.folder
                named = at_start and chosen.named
                if at_start and chosen.away:
                    print(f"reading step {chosen.step} in the object store failed: {damaged}", flush=True)
                elif at_start:
                    print(f"the checkpoint of step {chosen.step} is damaged: {damaged}", flush=True)
                else:
                    print(f"the trainer died, and its newest checkpoint is damaged: {damaged}", flush=True)
                if run.stop_requested():
                    print("stopped; --ckpt.resume auto resumes from the newest good one", flush=True)
                    return EXIT_STOPPED
                try:
                    if not named:
                        config = config.sharing(ckpt=(config.ckpt or CkptConfig()).resuming_by_itself())
                    still = None if replaced(config, damaged.folder) else damaged
                    if still and named:
                        raise damaged_start(damaged)
                    chosen = choose_start(config, needs=kind.parts, damaged=still)
                    config = kind.with_sources(config, asked)
                    recipe = plan_recipe(kind, config, chosen, orchestrator and orchestrator.recipe)
                except UsageError as error:
                    if at_start:
                        raise
                    raise RoleFailed(str(error)) from None
    finally:
        run.unlock()


def _facts(config: RunConfig, orchestrator: Checked | None, roles: Sequence[str]) -> dict[str, Any]:
    """What only the launcher knows, for `preflight`. `roles`: those that are started here."""
    facts: dict[str, Any] = {"records_are_checked": True}
    if orchestrator is None:
        return facts
    of_run, own = cast(RLConfig, config), "inference" in roles
    context = of_run.inference.max_model_len if own else context_of(of_run.orchestrator)
    return facts | facts_of(orchestrator, context, own_server=own)


def orchestrate(config: OrchestratorConfig) -> int:
    """`orchestrator`: serve the trainer that runs, or will run, in the same output folder.

    The run's shared settings and its model are taken from the trainer.
    """
    if not config.inference_url:
        raise UsageError(
            "--inference-url: give the address of a running server, such as http://127.0.0.1:8000"
        )
    config, _ = settle(config, this_machine(), gpu_servers=serves_on_gpus())
    checked = check_orchestrator(config)
    recipe = checked.recipe
    start_logging()
    run = RunDirectory(config.output_dir)
    while True:
        print(f"waiting for a trainer in {run.path}", flush=True)
        attempt = wait_for(
            run.live_attempt,
            seconds=config.version_timeout,
            whom=f"a trainer in {run.path}",
            setting="--version-timeout",
        )
        kind = KINDS[attempt.command]
        if "orchestrator" in kind.roles or "orchestrator" not in kind.parts:
            raise RoleFailed(
                f"{run.path} is a run of {attempt.command}, which needs no separate orchestrator"
            )
        trainer = kind.trainer(run.read_config(kind.config))
        shared = {key: getattr(trainer, key) for key in ("model", "seed", "max_steps", "ckpt", "teachers")}
        of_run = config.model_copy(update=shared)
        of_trainer = of_run.run_directory()
        accepted = {name for ckpt in (config.ckpt, of_run.ckpt) if ckpt for name in ckpt.accept_changes}
        join_recipe(recipe, attempt, of_trainer, accepted)
        facts = facts_of(checked, context_of(of_run), own_server=False)
        found = preflight(kind, run.read_config(kind.config), Path(trainer.model.name), facts)
        for notice in found.notices:
            print(notice, flush=True)
        if found.errors:
            raise UsageError("\n".join(found.errors))
        turn = RoleStart("orchestrator", run)
        try:
            return run_orchestrator(of_run, attempt, of_trainer, turn, at_once=_interrupt)
        except AttemptOver as over:
            print(over, flush=True)


def _interrupt() -> None:
    raise KeyboardInterrupt
