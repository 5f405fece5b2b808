"""The table of steps by which the plan of a command is made, and what most of them do.

The order is behaviour: which of several errors a user sees first, and what a step finds in the settings that
it reads. A new launch-time feature is one file with its functions and one row here
(docs/how-to/seams.md).
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

from cairn.config.cli import require
from cairn.config.kinds import KINDS
from cairn.config.model import ModelConfig
from cairn.launch.jobs.export import refuse_conflicts, with_exports
from cairn.launch.memory import frozen_folders
from cairn.launch.plan import dry_run, evaluation, hardware, memory_check
from cairn.launch.plan.division import has_several_gpus, with_gpus, with_servers_chosen
from cairn.launch.plan.environments import check_orchestrator, facts_of
from cairn.launch.plan.external_servers import (
    context_of,
    facts_of_run,
    with_servers,
)
from cairn.launch.plan.model import model_to_serve, resolve_model
from cairn.launch.plan.other_models import Teachers, with_auxiliary_models
from cairn.launch.plan.preflight import preflight
from cairn.launch.plan.recipe import finish_recipe, join, plan_recipe, trainers_config, wait_for_trainer
from cairn.launch.plan.remote_start import is_remote, with_remote
from cairn.launch.plan.run_plan import Draft, PlanStep, untouched
from cairn.launch.plan.settings import with_ratings, with_steps
from cairn.launch.preemption import asking
from cairn.launch.start import choose_start, ended_early, is_complete
from cairn.launch.supervise.slot import EarlyProcess
from cairn.run.errors import UsageError
from cairn.run.output import importing
from cairn.trainer.tracking import check_login

CONVERTED = "converted"
"""Name of the folder in the run directory for a model whose weights came in another program's format."""


# What is given


def _required(draft: Draft) -> Draft:
    if draft.command == "orchestrator" and not draft.config.inference_url:
        raise UsageError(
            "--inference-url: give the address of a running server, such as http://127.0.0.1:8000"
        )
    if draft.command == "eval":
        evaluation.require_models(draft.config)
    else:
        require(draft.config, *NEEDS.get(draft.command, ()))
    return draft


def _required_if_given(draft: Draft) -> Draft:
    """A dry run may also show the defaults of everything."""
    try:
        return _required(draft)
    except UsageError as error:
        return draft.having(missing=str(error).splitlines()[0])


def _length(draft: Draft) -> Draft:
    said: list[str] = []
    config = with_steps(draft.kind, draft.config, said.append)
    return draft.having(config=config, notes=(*draft.notes, *said))


def _environments(draft: Draft) -> Draft:
    own = draft.config if draft.command == "orchestrator" else draft.kind.of("orchestrator", draft.config)
    return draft.having(checked=check_orchestrator(own))


def _extensions(draft: Draft) -> Draft:
    """The user's own loss and optimisers, which import torch; other runs need not wait for that."""
    trainer = draft.trainer
    if own_loss := trainer.own_loss:
        from cairn.trainer.losses import make_loss

        make_loss(own_loss, trainer.kl_in_loss)
    optimizers = [trainer.optimizer, *(one.optimizer for one in trainer.auxiliary_models.values())]
    if any(one.is_own for one in optimizers):
        from cairn.trainer.optimizers import check_optimizer

        for optimizer in optimizers:
            check_optimizer(optimizer)
    return draft


def _tracking(draft: Draft) -> Draft:
    check_login(draft.trainer)
    return draft


def _preemption(draft: Draft) -> Draft:
    asking(draft.config.preemption)
    return draft


def _ratings(draft: Draft) -> Draft:
    return draft.having(config=with_ratings(draft.config))


def _exports(draft: Draft) -> Draft:
    return draft.having(config=with_exports(draft.config))


# What the run starts from


def _remote(draft: Draft) -> Draft:
    config, away = with_remote(draft.config, draft.kind.parts)
    return draft.having(config=config, away=away)


def _start(draft: Draft) -> Draft:
    start = choose_start(draft.config, needs=draft.kind.parts, damaged=draft.damaged, away=draft.away)
    return draft.having(start=start)


def _conflicts(draft: Draft) -> Draft:
    refuse_conflicts(draft.config, draft.first)
    return draft


def _complete(draft: Draft) -> Draft:
    config, start = draft.config, draft.first
    if not is_complete(config, start):
        return draft
    assert start.manifest is not None, "a complete run has a last step"
    done = (
        f"the run is complete: {start.folder} is step {start.step} of --max-steps {config.max_steps}; "
        "give a larger --max-steps to continue"
    )
    return draft.having(complete=ended_early(config, start) or done)


def _complete_said(draft: Draft) -> Draft:
    if draft.start is None:
        return draft
    draft = _complete(draft)
    return draft.finding(draft.complete) if draft.complete else draft


# What it does there


def _recipe(draft: Draft) -> Draft:
    asked = draft.checked and draft.checked.recipe
    return draft.having(recipe=plan_recipe(draft.kind, draft.config, draft.first, asked))


def _recipe_if_resumed(draft: Draft) -> Draft:
    """What a checkpoint's recipe has against going on; `preflight` looks at the data of other runs."""
    if draft.missing or draft.start is None or draft.start.folder is None:
        return draft
    return _recipe(draft)


def _servers(draft: Draft) -> Draft:
    config, roles = with_servers(draft.config, list(draft.roles))
    return draft.having(config=config, settled=config, roles=tuple(roles))


def _model(draft: Draft) -> Draft:
    """The policy's folder takes the place of its name."""
    if draft.command == "inference":
        return draft.having(model=resolve_model(draft.config.model))
    if draft.first.folder:
        model = str(model_to_serve(draft.first.folder, draft.trainer.lora))
    else:
        model = resolve_model(draft.config.model, _cache(draft))
    return draft.having(model=model, config=draft.config.sharing(model=ModelConfig(name=model)))


def _parts_of_the_model(draft: Draft) -> Draft:
    """What takes the model's code, such as names of weights: it is imported with torch, only if needed."""
    if not draft.model:
        return draft
    with importing():
        from cairn.trainer.models.model import check_parts
        from cairn.trainer.models.value_model import ValueModel

    remade = partial(ValueModel, bias=False) if draft.trainer.task == "reward" else lambda model: model
    try:
        check_parts(Path(draft.model), draft.trainer, remade)
    except UsageError as error:
        raise UsageError(f"{draft.kind.flags('trainer')}{error}") from None
    return draft


def _trained_models(draft: Draft) -> Draft:
    return draft.having(config=with_auxiliary_models(draft.kind, draft.config, draft.first, _cache(draft)))


def _teachers(draft: Draft) -> Draft:
    recipe: dict[str, Any] = copy.deepcopy(dict(draft.recipe))
    teachers = Teachers(draft.settled.model, draft.first, draft.kind.flags("trainer"), _cache(draft))
    sources = teachers.settle(draft.trainer, Path(draft.model), recipe["trainer"])
    return draft.having(config=draft.kind.with_sources(draft.config, sources), recipe=recipe)


def _shared_by_others(draft: Draft) -> Draft:
    with importing():
        from cairn.trainer.models.model import check_shared

    beside = (one.model for one in draft.trainer.auxiliary_models.values())
    for folder in (*frozen_folders(draft.trainer, draft.model), *beside):
        if Path(folder).is_dir():  # others are the policy's, or not there yet in a dry run
            check_shared(Path(folder), draft.trainer.beside_policy)
    return draft


def _preflight(draft: Draft) -> Draft:
    facts = facts_of_run(draft, records_are_checked=True)
    found = preflight(draft.kind, draft.config, Path(draft.model), facts)
    if found.errors:
        raise UsageError("\n".join(found.errors))
    return draft.having(notes=(*draft.notes, *found.notices))


def _preflight_of_joined(draft: Draft) -> Draft:
    """The same for the run of a trainer that was started on its own; notices are said in any case."""
    assert draft.attempt is not None
    assert draft.checked is not None
    facts = facts_of(draft.checked, context_of(draft.config), own_server=False)
    kind, config = KINDS[draft.attempt.command], trainers_config(draft)
    found = preflight(kind, config, Path(draft.model), facts)
    for notice in found.notices:
        print(notice, flush=True)
    if found.errors:
        raise UsageError("\n".join(found.errors))
    return draft


def _finished_recipe(draft: Draft) -> Draft:
    ckpt, recipe = draft.config.ckpt, copy.deepcopy(dict(draft.recipe))
    goes_on = ckpt is not None and ckpt.resume == "auto"
    run = draft.config.run_directory()
    finish_recipe(recipe, Path(draft.model), draft.first, run, goes_on=goes_on)
    return draft.having(recipe=recipe)


def _cache(draft: Draft) -> Path:
    return draft.config.run_directory().path / CONVERTED


def _is_first(draft: Draft) -> bool:
    """Whether nothing was started by an earlier plan."""
    return draft.damaged is None


# The table

RUNS = frozenset(KINDS)
RL, INFERENCE, ORCHESTRATOR, EVAL = map(frozenset, (("rl",), ("inference",), ("orchestrator",), ("eval",)))
ALL = RUNS | INFERENCE | ORCHESTRATOR | EVAL
NEEDS = {command: kind.needs for command, kind in KINDS.items()} | {"inference": ("model.name",)}
"""Settings without which a command can't start; of a|b, one is enough."""

STEPS = (
    PlanStep("required settings", _required, ALL, dry=_required_if_given),
    PlanStep("length", _length, RUNS, gives=("config", "notes")),
    PlanStep("environments", _environments, RL | ORCHESTRATOR, gives=("checked",)),
    PlanStep("tracking", _tracking, RUNS),
    PlanStep("own losses and optimisers", _extensions, RUNS),
    PlanStep("preemption", _preemption, RUNS, when=lambda draft: draft.config.preemption is not None),
    PlanStep("sinks", dry_run.check_sinks, RUNS, gives=("notes",), dry=dry_run.sinks),
    PlanStep("ratings", _ratings, RUNS, gives=("config",)),
    PlanStep("exports", _exports, RUNS, gives=("config",)),
    PlanStep(
        "the object store, and with it what the run resumes from", _remote, RUNS,
        gives=("config", "away"), touches=("disk", "network"), when=lambda draft: is_remote(draft.config),
        prints="what is downloaded, set aside, or taken over",
    ),
    PlanStep(
        "start", _start, RUNS, needs=("away",), gives=("start",),
        prints="damaged checkpoints that are passed over",
    ),
    PlanStep("conflicts of exports", _conflicts, RUNS, needs=("start",), when=_is_first),
    PlanStep(
        "complete", _complete, RUNS, needs=("start",), gives=("complete",), when=_is_first,
        dry=_complete_said,
    ),
    PlanStep(
        "policies", evaluation.find_policies, EVAL, gives=("policies",), touches=("disk", "network"),
        dry=evaluation.find_policies_here,
    ),
    PlanStep(
        "settings of the policy's run", evaluation.as_in_run, EVAL, needs=("policies",), gives=("config",),
        prints="whose settings are taken",
    ),
    PlanStep(
        "evaluations", evaluation.evaluations, EVAL, gives=("config",), dry=evaluation.evaluations_if_any
    ),
    PlanStep("environments of evaluations", evaluation.check_evaluations, EVAL, needs=("policies",)),
    PlanStep(
        "machine", hardware.machine, ALL, gives=("machine", "vllm", "gpu_servers"),
        dry=hardware.machine_planned,
    ),
    PlanStep(
        "GPUs of given servers", hardware.gpus_of_servers, RL, needs=("machine",), gives=("taken",),
        touches=("network",),
        when=lambda draft: not draft.own_server and draft.machine.has_gpus and not draft.given.machine,
    ),
    PlanStep(
        "own servers", with_servers_chosen, RL, needs=("machine", "vllm"), gives=("config", "choices"),
        touches=("network",), when=has_several_gpus, dry=with_servers_chosen,
    ),
    PlanStep(
        "GPUs", with_gpus, RUNS | INFERENCE | EVAL, needs=("machine", "vllm"),
        gives=("config", "placing", "roles", "choices"),
        when=lambda draft: draft.command in KINDS or draft.own_server,
    ),
    PlanStep(
        "build of torch", hardware.torch, RUNS, needs=("placing",),
        when=lambda draft: not draft.given.machine,
    ),
    PlanStep(
        "Ray cluster", hardware.cluster, RUNS, needs=("placing",), gives=("config", "cluster"),
        touches=("network",), when=lambda draft: draft.trainer.ray.address is not None,
        dry=hardware.cluster_seen, prints="that a cluster has no GPU, or what it lacks",
    ),
    PlanStep(
        "device defaults", hardware.device_defaults, ALL, needs=("machine",),
        gives=("config", "settled", "choices"),
    ),
    PlanStep(
        "recipe", _recipe, RUNS, needs=("start", "settled"), gives=("recipe",), dry=_recipe_if_resumed,
        prints="differences from the checkpoint",
    ),
    PlanStep(
        "GPUs in words", hardware.words, RUNS, needs=("placing",), dry=untouched,
        prints="whose GPUs are whose",
    ),
    PlanStep(
        "own server", _servers, RL, needs=("settled",), gives=("config", "settled", "roles"),
        when=lambda draft: draft.own_server, dry=untouched,
    ),
    PlanStep(
        "the servers at --orchestrator.inference-url", _servers, RL, needs=("settled",),
        gives=("config", "settled", "roles"), touches=("network",), when=lambda draft: not draft.own_server,
    ),
    PlanStep(
        "file systems", hardware.file_systems, RUNS, touches=("disk",), dry=hardware.file_systems_here,
        prints="what is done otherwise on network file systems",
    ),
    PlanStep(
        "model", _model, RUNS, needs=("start", "settled"), gives=("config", "model"),
        touches=("disk", "network"), dry=dry_run.model, prints="what is converted or created",
    ),
    PlanStep(
        "served model", _model, INFERENCE, needs=("settled",), gives=("model",),
        touches=("disk", "network"), dry=dry_run.model, prints="what is converted or created",
    ),
    PlanStep(
        "frozen weights, what ranks share, replayed experts", _parts_of_the_model, RUNS, needs=("model",),
        when=lambda draft: bool(draft.trainer.freeze)
        or draft.trainer.backend != "fsdp2"
        or draft.trainer.parallel.is_used
        or draft.trainer.replays_experts,
    ),
    PlanStep(
        "models trained with the policy", _trained_models, RUNS, needs=("start", "model"),
        gives=("config",), touches=("disk", "network"), dry=dry_run.trained_models,
    ),
    PlanStep(
        "models that score batches", _teachers, RUNS, needs=("start", "model", "recipe"),
        gives=("config", "recipe"), touches=("disk", "network"), dry=dry_run.teachers,
    ),
    PlanStep(
        "what ranks share of other models", _shared_by_others, RUNS, needs=("model",),
        when=lambda draft: max(draft.trainer.parallel.tensor, draft.trainer.parallel.expert) > 1,
    ),
    PlanStep(
        "what fills the GPUs' memory", memory_check.room_used, RUNS, needs=("placing", "model"),
        gives=("config", "counted"), when=memory_check.trains_on_own_gpus,
        dry=memory_check.room_used_in_words,
    ),
    PlanStep(
        "memory", memory_check.refuse, RUNS | INFERENCE, needs=("model",), gives=("config",),
        touches=("network",), dry=memory_check.estimate, prints="warnings where it may not be enough",
    ),
    PlanStep("memory of a server", untouched, ORCHESTRATOR | EVAL, dry=memory_check.estimate),
    PlanStep(
        "the trainer whose run it joins", wait_for_trainer, ORCHESTRATOR, gives=("attempt",),
        touches=("disk",), prints="that it waits",
    ),
    PlanStep(
        "its settings and recipe", join, ORCHESTRATOR, needs=("attempt", "checked", "settled"),
        gives=("config", "model"), touches=("disk",), dry=untouched, prints="differences",
    ),
    PlanStep(
        "the trainer's processes",
        lambda draft: draft.having(early=EarlyProcess("trainer", draft.command, draft.config)), RUNS,
        needs=("start", "model"), gives=("early",),
        when=lambda draft: draft.trainer.ray.address is None, dry=untouched,
    ),
    PlanStep("preflight", _preflight, RUNS, needs=("model",), gives=("notes",), dry=dry_run.preflight),
    PlanStep(
        "preflight of the run it joins", _preflight_of_joined, ORCHESTRATOR, needs=("attempt", "model"),
        dry=untouched, prints="what it notices of data and model",
    ),
    PlanStep(
        "finished recipe", _finished_recipe, RUNS, needs=("start", "model", "recipe"), gives=("recipe",),
        dry=untouched,
    ),
)  # fmt: skip
"""In this order. Commands that train share most rows; each column is explained in `PlanStep`."""
