"""Decides which of this machine's GPUs each role of a run uses, before anything is started.

`place` is a function of the settings and the machine alone. Its result is written into the settings
(`placed`), and each role's process restricts itself to its GPUs by CUDA_VISIBLE_DEVICES (`use_gpus`).
"""

import importlib.util
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cairn.config.inference import InferenceConfig
from cairn.config.kinds import RunConfig, RunKind
from cairn.config.rl import RLConfig
from cairn.config.trainer import TrainerBase
from cairn.inference.vllm_command import Build
from cairn.launch.plan.colocation import taking_turns
from cairn.run.errors import UsageError
from cairn.run.machine import Gpu, Machine, gpu_list, gpu_names, gpus_named

NONE_TAKEN: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Placing:
    """Which GPUs the roles of a run use.

    trainer: those of its ranks, in their order; none if it trains on the CPU or in a given Ray cluster.
    server: those of the run's own servers; none if there are no such servers, or if they serve on the CPU.
    workers: the number of ranks; None: as many as the Ray cluster at `ray.address` has GPUs.
    servers: the number of the run's own servers, each of which has as many of these GPUs. why: the reason.
    colocate: whether trainer and server share what they have, and so take turns.
    """

    trainer: tuple[Gpu, ...]
    server: tuple[Gpu, ...]
    workers: int | None
    servers: int = 0
    why: str = ""
    colocate: bool = False
    in_cluster: bool = False
    """Whether the ranks run in a given Ray cluster."""

    def of_ranks(self, machine: Machine) -> Machine:
        """The machine as the ranks see it, with their GPUs; nodes of a Ray cluster are taken for equal."""
        return machine if self.in_cluster else replace(machine, gpus=self.trainer)

    def in_words(self) -> str:
        """One line about which GPUs are whose; empty if there are none."""
        if self.colocate and self.trainer:
            return f"{_list(self.trainer)} trains and serves in turns"
        parts = [
            f"{_list(gpus)} {verb}{'s' if len(gpus) == 1 else ''}"
            for gpus, verb in ((self.trainer, "train"), (self.server, "serve"))
            if gpus
        ]
        several = f" ({self.servers} servers)" if self.server and self.servers > 1 else ""
        return "; ".join(parts) + several


def place(
    kind: RunKind,
    config: RunConfig,
    machine: Machine,
    vllm: Build = "gpu",
    taken: Mapping[str, str] = NONE_TAKEN,
) -> Placing:
    """Divide the GPUs of `machine` between the roles that the run starts.

    Args:
        vllm: the build of vLLM for the run's own server.
        taken: by UUID, the GPUs that given servers use, each with the address of its server. The trainer gets
            them only if its settings name them.

    Raises:
        UsageError: there are too few, one is not there or is given twice, or the settings contradict.
    """
    if isinstance(config, RLConfig):
        if not config.orchestrator.inference_url:
            return _beside_server(config, machine, vllm)
        if config.colocate:
            raise UsageError(
                "--colocate: the run's servers are given by --orchestrator.inference-url, and only a server "
                "that the run starts itself can take turns with the trainer"
            )
    trainer = kind.trainer(config)
    flags = kind.flags("trainer")
    if trainer.ray.address:
        return _in_cluster(trainer, flags)
    free = [gpu for gpu in machine.gpus if gpu.uuid not in taken]
    if machine.has_gpus and not free and trainer.gpus is None:
        raise UsageError(
            f"the server at {taken[machine.gpus[0].uuid]} uses {_list(machine.gpus)}, and {_this(machine)}: "
            "none is left for the trainer. Stop it and leave out --orchestrator.inference-url: rl then "
            "starts a server of its own, which takes turns with the trainer if there is one GPU"
        )
    beside = " beside the servers'" if len(free) < len(machine.gpus) else ""
    gpus = _trainers(trainer, machine, free, flags, beside)
    return Placing(gpus, (), trainer.workers or len(gpus) or 1)


def placed(
    kind: RunKind,
    config: RunConfig,
    machine: Machine,
    vllm: Build = "gpu",
    taken: Mapping[str, str] = NONE_TAKEN,
) -> tuple[RunConfig, Placing]:
    """The settings with `workers`, `gpus` and `colocate` as `place` decides, and the decision itself.

    Where there is no GPU, `gpus` stays as given.

    Raises:
        UsageError: see `place`; or the ranks can't be divided as the settings say.
    """
    placing = place(kind, config, machine, vllm, taken)
    if problem := kind.trainer(config).problem_of_ranks(placing.workers or 1):
        raise UsageError(problem)
    trainer: dict[str, Any] = {"workers": placing.workers}
    if machine.has_gpus and not kind.trainer(config).ray.address:
        trainer["gpus"] = _named(placing.trainer)
    if not isinstance(config, RLConfig):
        return config.model_copy(update=trainer), placing
    update: dict[str, Any] = {
        "trainer": config.trainer.model_copy(update=trainer),
        "colocate": placing.colocate,
    }
    if machine.has_gpus and not config.orchestrator.inference_url:
        serving = {"gpus": _named(placing.server), "servers": placing.servers}
        update["inference"] = config.inference.model_copy(update=serving)
    config = config.model_copy(update=update)
    return taking_turns(config) if placing.colocate else config, placing


def placed_server(
    config: InferenceConfig, machine: Machine, vllm: Build, flags: str = "--"
) -> InferenceConfig:
    """The settings of a server that is no part of a run, with the names of its GPUs in `gpus`.

    Without `gpus` it may use all visible ones, as vLLM does.

    Args:
        flags: what the flags of its settings begin with.

    Raises:
        UsageError: there are too few GPUs, or one is not there.
    """
    gpus, _ = _serving(config, machine, machine.gpus, vllm, flags, count=1)
    if config.gpus is None or not machine.has_gpus:
        return config
    return config.model_copy(update={"gpus": _named(gpus)})


def check_torch(placing: Placing, version: str | None) -> None:
    """Check that torch can use the trainer's GPUs. `version`: its version, if it is built without CUDA.

    Raises:
        UsageError: it can't.
    """
    if placing.trainer and version:
        raise UsageError(
            f"{_list(placing.trainer)} would train, but torch {version} is built without CUDA: install the "
            "build for GPUs (`scripts/setup gpu`), or train on the CPU (gpus 0)"
        )


def torch_without_cuda() -> str | None:
    """The version of the installed torch if it is built without CUDA, else None; torch is not imported."""
    found = importlib.util.find_spec("torch")
    folders = found.submodule_search_locations if found else None
    if not folders:
        return None
    built = runpy.run_path(str(Path(folders[0]) / "version.py"))
    return None if built.get("cuda") else str(built.get("__version__"))


def gpus_of_server(config: RunConfig) -> tuple[str, ...]:
    """The names of the GPUs that `placed` has given to the run's own servers."""
    return gpu_names(config.inference.gpus or "0") or () if isinstance(config, RLConfig) else ()


def _beside_server(config: RLConfig, machine: Machine, vllm: Build) -> Placing:
    """The division between the trainer and a server that the run starts."""
    trainer, server = config.trainer, config.inference
    if trainer.ray.address:
        if config.colocate:
            raise UsageError(
                f"--colocate: the trainer runs in the Ray cluster at {trainer.ray.address} (--trainer.ray."
                "address), and only a trainer on this machine can take turns with the server"
            )
        # One, since the cluster may use other GPUs of this machine.
        serving, count = _serving(server, machine, machine.gpus, vllm, "--inference.", count=server.servers)
        why = "the Ray cluster may use the other GPUs of this machine"
        return replace(_in_cluster(trainer, "--trainer."), server=serving, servers=count, why=why)
    of_trainer = _find(trainer.gpus, machine, "--trainer.gpus")
    of_server = _find(server.gpus, machine, "--inference.gpus")
    if _takes_turns(config, machine, vllm, of_trainer, of_server):
        return _turns(config, machine, of_trainer, of_server)
    both = [gpu for gpu in of_trainer or () if gpu in (of_server or ())]
    if both:
        raise UsageError(
            f"--trainer.gpus {trainer.gpus} and --inference.gpus {server.gpus} both name {_list(both)}; "
            "give each role its own, or let them take turns on a single one with --colocate"
        )
    left = [gpu for gpu in machine.gpus if gpu not in (of_trainer or ())]
    most = len(left) if of_trainer is not None else _not_training(trainer, machine)
    serving, count = _serving(server, machine, left, vllm, "--inference.", count=server.servers, most=most)
    left = [gpu for gpu in machine.gpus if gpu not in serving]
    if machine.has_gpus and not left and trainer.gpus is None:
        flag = f"--inference.{_asked(server, count)}"
        raise UsageError(
            f"{flag}: {'the server takes' if count == 1 else 'the servers take'} {_list(serving)}, all that "
            f"{_this(machine)}, and {'leaves' if count == 1 else 'leave'} none for the trainer; lower it, or "
            "give the address of a server on another machine (--orchestrator.inference-url)"
            + (", or leave out --no-colocate" if len(serving) == 1 else "")
        )
    training = _trainers(trainer, machine, left, "--trainer.", " beside the server's")
    why = "those that the trainer's settings leave"
    if server.servers or server.gpus:
        why = "as given"
    elif trainer.gpus is None and trainer.workers is None:
        why = "half of the GPUs, since to generate takes about as long as to train"
    return Placing(training, serving, trainer.workers or len(training) or 1, count, why)


def _not_training(trainer: TrainerBase, machine: Machine) -> int:
    """How many GPUs the trainer's settings leave: half of them, if they say nothing."""
    number = trainer.workers if trainer.gpus is None else int(trainer.gpus)
    return len(machine.gpus) // 2 if number is None else len(machine.gpus) - number


def _takes_turns(
    config: RLConfig,
    machine: Machine,
    vllm: Build,
    of_trainer: Sequence[Gpu] | None,
    of_server: Sequence[Gpu] | None,
) -> bool:
    """Whether trainer and server share a GPU: if asked to, and by default if there is one for both."""
    if config.colocate is not None:
        return config.colocate
    wanted = {config.trainer.gpus, config.inference.gpus}
    single = len(machine.gpus) == 1 and vllm == "gpu"
    single = single and config.inference.size * (config.inference.servers or 1) == 1
    return single and "0" not in wanted and (bool(of_trainer or of_server) or wanted <= {None, "1"})


def _turns(
    config: RLConfig, machine: Machine, of_trainer: Sequence[Gpu] | None, of_server: Sequence[Gpu] | None
) -> Placing:
    """Both roles on one GPU, or both on the CPU."""
    values = [value for value in (config.trainer.gpus, config.inference.gpus) if value is not None]
    counts = [int(value) for value in values if gpu_names(value) is None]
    gpus = tuple(of_trainer or of_server or machine.gpus[: counts[0] if counts else None])
    differ = of_trainer is not None and of_server is not None and set(of_trainer) != set(of_server)
    one_on_cpu = machine.has_gpus and counts == [0]
    if differ or one_on_cpu or any(count != len(gpus) for count in counts):
        raise UsageError(
            "--colocate: both roles use one and the same GPU, which is contradicted by --trainer.gpus "
            f"{config.trainer.gpus} and --inference.gpus {config.inference.gpus}; {_this(machine)}"
        )
    if (servers := config.inference.servers or 1) > 1:
        raise UsageError(
            f"--inference.servers {servers}: with --colocate, trainer and server take turns, and it is one "
            "server that does; leave one of the two out"
        )
    size, workers = config.inference.size, config.trainer.workers or len(gpus) or 1
    if gpus and (len(gpus), size, workers) != (1, 1, 1):
        raise UsageError(
            "--colocate: trainer and server take turns on a single GPU, but this would be "
            f"{_list(gpus)} with {workers} workers and a server on {_count(size)}; choose a GPU, as in "
            f"--trainer.gpus {_named(gpus[:1])} with one worker and --inference.tensor-parallel 1, or leave "
            "--colocate out"
        )
    return Placing(gpus, gpus, workers, servers, "in turns on one GPU", colocate=True)


def _in_cluster(trainer: TrainerBase, flags: str) -> Placing:
    if trainer.gpus not in (None, "0"):
        raise UsageError(
            f"{flags}gpus {trainer.gpus}: the Ray cluster at {trainer.ray.address} decides which GPUs its "
            f"workers get; say how many there are with {flags}workers, and which ones the cluster may use "
            "where its nodes are started (CUDA_VISIBLE_DEVICES=0,1 ray start ...)"
        )
    workers = 1 if trainer.gpus == "0" and trainer.workers is None else trainer.workers
    return Placing((), (), workers, in_cluster=trainer.gpus is None)


def _serving(
    server: InferenceConfig,
    machine: Machine,
    among: Sequence[Gpu],
    vllm: Build,
    flags: str,
    *,
    count: int | None,
    most: int = 0,
) -> tuple[tuple[Gpu, ...], int]:
    """The GPUs of servers, those that are named or the last ones of `among`; and how many servers there are.

    Args:
        count: the number of servers, if it is given; else there are as many as fit onto the GPUs that are
            given for them, or onto `most`, but at least one.
    """
    size = server.size
    if vllm == "cpu":
        if server.gpus not in (None, "0"):
            raise UsageError(
                f"{flags}gpus {server.gpus}: vLLM's CPU build is installed; `scripts/setup gpu` replaces it"
            )
        return (), count or 1
    if server.gpus is None:
        count = count or max(1, most // size)
        if not machine.has_gpus:
            return (), count
        if size * count > len(among):
            raise UsageError(
                f"{flags}{_asked(server, count)}: {'the server needs' if count == 1 else 'the servers need'} "
                f"{_count(size * count)}, but {_this(machine)}"
                + (f", of which {len(among)} left" if len(among) < len(machine.gpus) else "")
                + "; lower it, or start the server where there are more"
            )
        return tuple(among[len(among) - size * count :]), count
    gpus = _take(server.gpus, machine, among, f"{flags}gpus", " beside the trainer's", last=True)
    if len(gpus) % size or (count and gpus and len(gpus) != size * count):
        uses = f"the server uses {size}" if count == 1 else f"a server uses {size}"
        uses = f"{count} servers use {size * count}" if count and count > 1 else uses
        mend = "make them equal" if count else "give a multiple of that"
        raise UsageError(
            f"{flags}gpus {server.gpus}: that is {_count(len(gpus))}, but {uses} "
            f"({flags}tensor-parallel {server.tensor_parallel or 1}); {mend}"
        )
    return gpus, count or max(1, len(gpus) // size)


def _asked(server: InferenceConfig, count: int) -> str:
    """The flag, without what it begins with, and value of what decides how many GPUs servers need."""
    return f"servers {count}" if count > 1 else f"tensor-parallel {server.tensor_parallel or 1}"


def _trainers(
    trainer: TrainerBase, machine: Machine, among: Sequence[Gpu], flags: str, beside: str
) -> tuple[Gpu, ...]:
    """The GPUs of the trainer: those that are named, or the first ones of `among`, one for each worker."""
    workers = trainer.workers
    gpus = tuple(among)
    if trainer.gpus is not None:
        gpus = _take(trainer.gpus, machine, among, f"{flags}gpus", beside)
    if workers and gpus and workers > len(gpus):
        chosen = f"{flags}gpus {trainer.gpus} chooses {len(gpus)}" if trainer.gpus else ""
        there = _count(len(gpus)) + (" is" if len(gpus) == 1 else " are") + f" left{beside}"
        raise UsageError(
            f"{flags}workers {workers}: each worker needs a GPU of its own, and "
            f"{chosen or (there if beside else _this(machine))}; lower it to {len(gpus)}"
        )
    return gpus[:workers]


def _take(
    value: str, machine: Machine, among: Sequence[Gpu], flag: str, beside: str, *, last: bool = False
) -> tuple[Gpu, ...]:
    """The GPUs that a value of `flag` names, or as many as it says: the first, or the last, of `among`."""
    named = _find(value, machine, flag)
    if named is not None:
        return named
    count = int(value)
    if count > len(among):
        left = f"; {len(among)} left{beside}" if len(among) < len(machine.gpus) else ""
        raise UsageError(f"{flag} {value}: {_this(machine)}{left}; lower it")
    return tuple(among[len(among) - count :] if last else among[:count])


def _find(value: str | None, machine: Machine, flag: str) -> tuple[Gpu, ...] | None:
    """The GPUs that a value names; None if it names none, but says at most how many.

    Raises:
        UsageError: one is not there, or is named twice.
    """
    names = None if value is None else gpu_names(value)
    if names is None:
        return None
    found: list[Gpu] = []
    for name in names:
        matching = gpus_named(machine.gpus, name)
        if len(matching) != 1:
            raise UsageError(f"{flag} {value}: there is no GPU {name}; {_this(machine)}")
        if matching[0] in found:
            raise UsageError(f"{flag} {value}: names GPU {matching[0].index} twice")
        found += matching
    return tuple(found)


def _name(gpu: Gpu) -> str:
    """How CUDA_VISIBLE_DEVICES names a GPU; a slice of one (MIG) has no number."""
    return gpu.uuid if gpu.uuid.startswith("MIG-") else str(gpu.index)


def _named(gpus: Sequence[Gpu]) -> str:
    return gpu_list([_name(gpu) for gpu in gpus])


def _list(gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return "no GPU"
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(map(_name, gpus))}"


def _count(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"


def _this(machine: Machine) -> str:
    """What the machine has, for a message."""
    if not machine.has_gpus:
        return "this machine has no GPU (or its driver or CUDA_VISIBLE_DEVICES shows none)"
    return f"this machine has {_list(machine.gpus)}"
