"""Steps of the plan about memory: what a start settles and refuses, and what a dry run says."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cairn.checkpoint.step_folder import StepFolder
from cairn.config.inference import InferenceConfig
from cairn.config.kinds import KINDS
from cairn.config.rl import RLConfig
from cairn.launch.memory import (
    PASS_TOKENS,
    CountedModels,
    Uncountable,
    check_serving,
    check_training,
    count_models,
    counted_if_possible,
    might_not_fit,
    refuse_what_can_not_be_served,
    refuse_what_does_not_fit,
    serving_needs,
    suggestion_of_replicas,
)
from cairn.launch.needs import RECORDED, cache_left, gib, with_cache
from cairn.launch.plan.colocation import share_memory
from cairn.launch.plan.external_servers import check_bases
from cairn.launch.plan.model import foreign_format
from cairn.launch.plan.run_plan import Draft
from cairn.launch.plan.settings import Choice
from cairn.run.errors import UsageError
from cairn.run.machine import Machine

# Settings that use the room that GPUs have

WHY = {
    "micro_batch_size": f"by estimate, each GPU has room for so many rows, up to {PASS_TOKENS} tokens",
    "keep_gathered": "by estimate, each GPU has room for all layers at once",
}
"""Settings of the trainer that the estimate sets where they are open, and why."""


def trains_on_own_gpus(draft: Draft) -> bool:
    """Whether GPUs train whose memory is known here; those of a given Ray cluster only the ranks see."""
    return draft.ranks.has_gpus and draft.trainer.ray.address is None


def room_used(draft: Draft) -> Draft:
    """With the trainer's models counted, and what is open of `WHY` where GPUs have room by estimate."""
    with _named_with_flags(draft):
        counted = counted_if_possible(draft.model, draft.trainer, draft.ranks)
    return _with_room_used(draft, counted)


def room_used_in_words(draft: Draft) -> Draft:
    """The same in a dry run, which shows the settings; its estimate says if a model can't be counted."""
    if not draft.config.model.name:
        return draft
    try:
        with _named_with_flags(draft):
            counted = count_models(draft.model or _folder(draft.config), draft.trainer, draft.ranks)
    except Uncountable:
        return draft
    before, draft = draft.trainer, _with_room_used(draft, counted)
    names = [name for name in WHY if getattr(before, name) != getattr(draft.trainer, name)]
    values = {name: getattr(draft.trainer, name) for name in names}
    prefix = draft.kind.flags("trainer").strip("-")
    choices = [Choice(f"{prefix}{name}", values[name], WHY[name]) for name in names]
    settled = draft.kind.trainer(draft.settled).model_copy(update=values)
    return draft.having(
        choices=(*draft.choices, *choices), settled=draft.kind.with_trainer(draft.settled, settled)
    )


@contextlib.contextmanager
def _named_with_flags(draft: Draft) -> Iterator[None]:
    """Say of which role the setting is with which a model can't be built, as the steps before this one do."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{draft.kind.flags('trainer')}{error}") from None


def _with_room_used(draft: Draft, counted: CountedModels | None) -> Draft:
    if counted is None:
        return draft
    trainer = counted.with_room_used(draft.trainer, draft.ranks)
    return draft.having(config=draft.kind.with_trainer(draft.config, trainer), counted=counted)


# A start


def refuse(draft: Draft) -> Draft:
    """Refuse what does not fit; trainer and server that take turns on one GPU get their shares of it."""
    config, placing, machine = draft.config, draft.placing, draft.machine
    if draft.command == "inference":
        if draft.vllm == "gpu":
            refuse_what_can_not_be_served(draft.model, config, machine, "--")
        return draft
    assert placing is not None
    if draft.cluster is None:
        refuse_what_does_not_fit(_counted(draft), draft.trainer, draft.ranks, draft.kind.flags("trainer"))
    if "inference" in draft.roles:
        serving = replace(machine, gpus=placing.server)
        server = draft.kind.of("inference", config)
        refuse_what_can_not_be_served(draft.model, server, serving, draft.kind.flags("inference"))
    elif "inference" in draft.kind.roles:
        check_bases(config, draft.model)
    if placing.colocate and placing.trainer:
        config, shares = share_memory(config, draft.model, draft.ranks, draft.counted)
        if shares.warning:
            print(f"warning: {shares.warning}", flush=True)
    return draft.having(config=config)


def _counted(draft: Draft) -> CountedModels | None:
    """The trainer's models, which on CPUs are counted only if they might not fit."""
    if trains_on_own_gpus(draft) or not might_not_fit(draft.model, draft.trainer, draft.ranks):
        return draft.counted
    with _named_with_flags(draft):
        return counted_if_possible(draft.model, draft.trainer, draft.ranks)


# A dry run


def estimate(draft: Draft) -> Draft:
    """Lines about the memory that the command's roles need."""
    serving = Machine()
    if draft.gpu_servers:
        serving = replace(draft.machine, gpus=draft.placing.server) if draft.placing else draft.machine
    return draft.finding(*_memory(draft, draft.config, serving))


def _memory(draft: Draft, config: Any, serving: Machine) -> Iterator[str]:
    """`serving`: with the GPUs of a server that the command starts."""
    name = config.model.name
    if not name:
        yield "no estimate of memory without --model.name"
        return
    if (form := foreign_format(Path(name))) is not None:
        yield f"{name} has the format {form}; its weights are converted once, before the start"
    folder, kind = draft.model or _folder(config), KINDS.get(draft.command)
    if (kind or draft.command == "inference") and "model" not in draft.known:
        return  # it was refused, and that is said
    try:
        if kind and not draft.ranks.memory:
            yield "no estimate for the Ray cluster's machines: --machine names one, such as 8x80G,1T"
        elif kind:
            yield from _training(draft, folder)
        if serving.has_gpus and kind and kind.sections:
            flags = kind.flags("inference")
            yield from _serving(folder, config.inference, serving, flags, in_turns=config.colocate)
            if config.colocate:
                yield from _in_turns(folder, config, serving, draft.counted)
        elif serving.has_gpus and draft.command == "inference":
            yield from _serving(folder, config, serving, "--", in_turns=False)
        elif serving.has_gpus and draft.command == "eval" and draft.own_server:
            yield from _serving(folder, config.inference, serving, "--inference.", in_turns=False)
    except Uncountable as error:
        yield f"no estimate of memory: {error}"


def _folder(config: Any) -> str:
    """What describes the model as it is named, or its name on the hub."""
    name = config.model.name
    folder = StepFolder(Path(name)).model
    if foreign_format(Path(name)) is not None and not (Path(name) / "config.json").is_file():
        return config.model.config or str(folder if folder.is_dir() else name)
    return str(folder) if folder.is_dir() else name


def _training(draft: Draft, folder: str) -> Iterator[str]:
    config, machine, flags = draft.trainer, draft.ranks, draft.kind.flags("trainer")
    with _named_with_flags(draft):
        counted = draft.counted or count_models(folder, config, machine)
    needs = counted.needs(config, machine)
    if machine.has_gpus:
        yield from _indented("training", needs.rank.lines(min(gpu.memory for gpu in machine.gpus)))
    yield from _indented("training", needs.host.lines(machine.memory))
    if config.replays_experts:
        yield _recorded(draft, counted)
    yield from _verdict(lambda: check_training(needs.rank, needs.host, config, machine, flags))
    if hint := suggestion_of_replicas(counted, config, machine, len(machine.gpus) or config.ranks):
        yield hint.replace("--replicas", f"{flags}replicas")


def _recorded(draft: Draft, counted: CountedModels) -> str:
    """What the experts take that servers tell of a batch's tokens, outside of the devices that train."""
    orchestrator, length = draft.config.orchestrator, draft.trainer.seq_len
    each = max(one.samples_per_prompt for one in orchestrator.of_environments())
    answers, ledger = orchestrator.prompts_per_step * each, counted.policy.recorded_bytes
    batch = RECORDED * counted.policy.recorded
    return (
        f"router_replay records the experts of {answers} answers of at most {length} tokens for each batch: "
        f"up to {gib(answers * length * ledger)} in the ledger and its copies in checkpoints "
        f"({ledger} bytes a token), and {gib(answers * length * batch)} in the batch's file and the memory "
        f"of its readers ({batch} bytes a token)"
    )


def _serving(
    folder: str, config: InferenceConfig, machine: Machine, flags: str, *, in_turns: bool
) -> Iterator[str]:
    need = with_cache(serving_needs(folder, config), config.kv_cache_memory)
    has = min(gpu.memory for gpu in machine.gpus)
    yield from _indented("the server", need.lines(has))
    if config.kv_cache_memory is None and not in_turns:
        yield f"  leaves about {gib(cache_left(need, has))} for keys and values, unless --vllm-args change it"
    yield from _verdict(lambda: check_serving(need, machine, flags))


def _in_turns(
    folder: str, config: RLConfig, machine: Machine, counted: CountedModels | None
) -> Iterator[str]:
    try:
        _, shares = share_memory(config, folder, machine, counted)
    except UsageError as error:
        yield f"error: {error}"
        return
    yield f"in turns on one GPU: {gib(shares.cache)} are left for keys and values"
    yield from [f"warning: {shares.warning}"] if shares.warning else []


def _indented(who: str, lines: list[str]) -> Iterator[str]:
    yield f"{who} {lines[0]}"
    yield from (f"  {line.strip()}" for line in lines[1:])


def _verdict(check: Callable[[], list[str]]) -> Iterator[str]:
    """What the command would say of it at its start."""
    try:
        yield from (f"warning: {warning}" for warning in check())
    except UsageError as error:
        yield f"error: {error}"
