"""What --dry-run prints: the configuration, and what it means on the machine."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from cairn.checkpoint.step_folder import StepFolder
from cairn.checkpoint.store import CheckpointStore
from cairn.config.cli import require
from cairn.config.critic import POLICY_AGAIN
from cairn.config.inference import InferenceConfig
from cairn.config.kinds import KINDS, RunConfig, RunKind
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.rl import RLConfig
from cairn.config.shared import CommandConfig
from cairn.config.teachers import START, WithTeachers, is_served
from cairn.config.trainer import TrainerBase
from cairn.inference.build import serves_on_gpus
from cairn.launch.jobs.export import exports_in_words, with_exports
from cairn.launch.plan.colocation import share_memory
from cairn.launch.plan.environments import check_orchestrator, facts_of
from cairn.launch.plan.external_servers import context_of
from cairn.launch.plan.gpu_assignment import placed, placed_server
from cairn.launch.plan.memory_check import Uncountable, serving_needs, training_needs
from cairn.launch.plan.memory_estimate import cache_left, check_serving, check_training, gib, with_cache
from cairn.launch.plan.model import described, foreign_format
from cairn.launch.plan.other_models import check_beside, check_source
from cairn.launch.plan.preflight import preflight
from cairn.launch.plan.settings import settle, with_ratings, with_steps
from cairn.launch.ray.gpus import cluster_of
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError, UsageError
from cairn.run.exits import EXIT_USAGE
from cairn.run.machine import Machine, machine_of, this_machine


def show(command: str, config: CommandConfig) -> int:
    """Print the resolved configuration as JSON, and for people, on standard error, what it means.

    That is what was chosen for the machine and why, an estimate of the memory that is needed, and what the
    start of a run would say of its data and models.

    Returns:
        The exit code: that of a start which would be refused, if one of the lines is an error.

    Raises:
        UsageError: `--machine` is no description of a machine.
    """
    machine = machine_of(config.machine) if config.machine else this_machine()
    gpu_servers = machine.has_gpus if config.machine else serves_on_gpus()
    vllm = "gpu" if gpu_servers else "cpu"
    lines = [f"planned for {in_words(machine)}"]
    ranks = serving = machine
    if command in KINDS:
        kind = KINDS[command]
        config = with_steps(kind, cast(RunConfig, config), lambda words: lines.append(f"  {words}"))
        config, placing = placed(kind, with_exports(with_ratings(cast(RunConfig, config))), machine, vllm)
        ranks, serving = placing.of_ranks(machine), replace(machine, gpus=placing.server)
        if placing.in_cluster and not config.machine:
            ranks = cluster_of(kind.trainer(cast(RunConfig, config)), waits=False)
        lines += [f"  {words}" for words in [placing.in_words(), exports_in_words(config)] if words]
    elif command == "inference":
        config = placed_server(cast(InferenceConfig, config), machine, vllm)
    settled, choices = settle(config, ranks, gpu_servers=gpu_servers)
    print(settled.model_dump_json(indent=2), flush=True)
    for choice in choices:
        value = "vLLM's choice" if choice.value is None else choice.value
        lines.append(f"  {choice.setting} = {value}: {choice.why}")
    lines += _memory(command, settled, ranks, serving if gpu_servers else Machine())
    if command in KINDS:
        lines += _vocabularies(KINDS[command], cast(RunConfig, settled))
        lines += _preflight(KINDS[command], cast(RunConfig, settled))
    elif command == "orchestrator":
        lines += _environments(cast(OrchestratorConfig, settled))
    print("\n".join(lines), file=sys.stderr, flush=True)
    return EXIT_USAGE if any(line.startswith("error: ") for line in lines) else 0


def in_words(machine: Machine) -> str:
    """A machine for people: its GPUs and its memory."""
    kinds = [f"{gpu.memory / 2**30:.0f} GiB ({gpu.name})" for gpu in machine.gpus]
    gpus = ", ".join(
        f"{kinds.count(kind)} GPU{'s' * (kinds.count(kind) > 1)} with {kind}" for kind in dict.fromkeys(kinds)
    )
    return f"{gpus or 'no GPU'}, {machine.memory / 2**30:.0f} GiB of memory"


def _memory(command: str, config: Any, ranks: Machine, serving: Machine) -> Iterator[str]:
    """Lines about the memory that the command's roles need.

    Args:
        ranks: with the GPUs that train.
        serving: with the GPUs of a server that the command starts.
    """
    name = config.model.name
    if not name:
        yield "no estimate of memory without --model.name"
        return
    folder = StepFolder(Path(name)).model
    folder = str(folder) if folder.is_dir() else name
    if (form := foreign_format(Path(name))) is not None:
        yield f"{name} has the format {form}; its weights are converted once, before the start"
        if not (Path(name) / "config.json").is_file():
            folder = config.model.config or folder
    kind = KINDS.get(command)
    try:
        if kind and not ranks.memory:
            yield "no estimate for the Ray cluster's machines: --machine names one, such as 8x80G,1T"
        elif kind:
            yield from _training(folder, kind.trainer(config), ranks, kind.flags("trainer"))
        if serving.has_gpus and kind and kind.sections:
            flags = kind.flags("inference")
            yield from _serving(folder, config.inference, serving, flags, in_turns=config.colocate)
            if config.colocate:
                yield from _in_turns(folder, config, serving)
        elif serving.has_gpus and command == "inference":
            yield from _serving(folder, config, serving, "--", in_turns=False)
    except Uncountable as error:
        yield f"no estimate of memory: {error}"


def _training(folder: str, config: TrainerBase, machine: Machine, flags: str) -> Iterator[str]:
    needs = training_needs(folder, config, machine)
    if machine.has_gpus:
        yield from _indented("training", needs.rank.lines(min(gpu.memory for gpu in machine.gpus)))
    yield from _indented("training", needs.host.lines(machine.memory))
    yield from _verdict(lambda: check_training(needs.rank, needs.host, config, machine, flags))


def _serving(
    folder: str, config: InferenceConfig, machine: Machine, flags: str, *, in_turns: bool
) -> Iterator[str]:
    need = with_cache(serving_needs(folder, config), config.kv_cache_memory)
    has = min(gpu.memory for gpu in machine.gpus)
    yield from _indented("the server", need.lines(has))
    if config.kv_cache_memory is None and not in_turns:
        yield f"  leaves about {gib(cache_left(need, has))} for keys and values, unless --vllm-args change it"
    yield from _verdict(lambda: check_serving(need, machine, flags))


def _in_turns(folder: str, config: RLConfig, machine: Machine) -> Iterator[str]:
    try:
        _, shares = share_memory(config, folder, machine)
    except UsageError as error:
        yield f"error: {error}"
        return
    yield f"in turns on one GPU: {gib(shares.cache)} are left for keys and values"
    yield from [f"warning: {shares.warning}"] if shares.warning else []


def _vocabularies(kind: RunKind, config: RunConfig) -> Iterator[str]:
    """What is wrong with the tokens of the models that score a run's batches, or are trained beside it."""
    trainer, flags = kind.trainer(config), kind.flags("trainer")
    checks: list[Callable[[Path], None]] = [
        partial(check_source, source, flag=f"{flags}{WithTeachers.sources_of[column]}")
        for column, source in trainer.teachers.items()
        if source != START and not is_served(source)
    ]
    checks += [
        partial(check_beside, section, one.model, flags=flags)
        for section, one in trainer.models_beside.items()
        if one.model != POLICY_AGAIN and not _goes_on(config)
    ]
    if not checks or not config.model.name:
        return

    def look(policy: Path) -> Iterator[str]:
        for check in checks:
            try:
                check(policy)
            except UsageError as error:
                yield f"error: {error}"

    yield from _of_policy(config, look, "whether other models have the policy's tokens")


def _of_policy(config: RunConfig, look: Callable[[Path], Iterator[str]], what: str) -> Iterator[str]:
    """What `look` finds in the folder of the policy, or why that can't be known yet; `what`: to be found."""
    try:
        policy = described(config.model)
    except UsageError as error:
        yield f"error: {error}"
        return
    if policy is None:
        yield f"{what} is found out once its weights are converted"
        return
    yield from look(policy)


def _environments(config: OrchestratorConfig) -> Iterator[str]:
    """What the start would say of the environments."""
    try:
        check_orchestrator(config)
    except CairnError as error:
        yield f"error: {error}"


def _preflight(kind: RunKind, config: RunConfig) -> Iterator[str]:
    """What the start would say of data and model."""
    try:
        require(config, *kind.needs)
    except UsageError as error:
        yield f"data and model are not looked at: {str(error).splitlines()[0]}"
        return
    yield from _of_policy(config, partial(_looked_at, kind, config), "what the model makes of the data")


def _looked_at(kind: RunKind, config: RunConfig, model: Path) -> Iterator[str]:
    facts: dict[str, Any] = {}
    if "orchestrator" in kind.roles:
        of_run = cast(RLConfig, config)
        urls = of_run.orchestrator.inference_url
        context = context_of(of_run.orchestrator) if urls else of_run.inference.max_model_len
        try:
            facts = facts_of(check_orchestrator(of_run.orchestrator), context, own_server=not urls)
        except CairnError as error:
            yield f"error: {error}"
    found = preflight(kind, config, model, facts)
    yield from found.notices
    yield from (f"error: {error}" for error in found.errors)


def _goes_on(config: RunConfig) -> bool:
    """Whether the run has a checkpoint to resume from, which has the models that are trained beside it."""
    ckpt = config.ckpt
    if ckpt is None or not ckpt.resumes:
        return False
    steps = CheckpointStore(RunDirectory(config.output_dir, ckpt.dir).checkpoints).steps()
    return ckpt.resume != "auto" or bool(steps)


def _indented(who: str, lines: list[str]) -> Iterator[str]:
    yield f"{who} {lines[0]}"
    yield from (f"  {line.strip()}" for line in lines[1:])


def _verdict(check: Callable[[], list[str]]) -> Iterator[str]:
    """What the command would say of it at its start."""
    try:
        yield from (f"warning: {warning}" for warning in check())
    except UsageError as error:
        yield f"error: {error}"
