"""Settings that several commands have: GPUs, supervision, preemption, Slurm."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from cairn.config.ckpt import CkptConfig
from cairn.config.model import ModelConfig
from cairn.config.settings import AbsolutePath, BaseConfig
from cairn.config.sinks import SinksConfig
from cairn.run.machine import gpu_list, gpu_names
from cairn.run.object_store import SCHEMES, is_url

if TYPE_CHECKING:
    from cairn.run.directory import RunDirectory


class CommandConfig(BaseConfig):
    """Settings that every command has."""

    model: ModelConfig = ModelConfig()
    dry_run: bool = False
    """Print the resolved configuration, what was chosen for this machine, and an estimate of memory; exit."""
    machine: str | None = None
    """With --dry-run: plan for another machine, such as 8x80G,1T (8 GPUs with 80 GiB, 1 TiB host memory)."""

    def settled(self, *, gpu: bool, gpu_servers: bool) -> Self:
        """With the values that settings left open have.

        Args:
            gpu: whether the trainer's ranks compute on GPUs.
            gpu_servers: whether vLLM does.
        """
        return self


class SharedConfig(CommandConfig):
    """Settings that the roles of a run share; in an RL run they are given once, for all roles."""

    seed: int = Field(default=0, ge=0)
    """Seed of all random draws of the run."""
    max_steps: int = Field(default=100, ge=1)
    """Total optimiser steps of the run, including those before a resume."""
    stop_after: int | None = Field(default=None, ge=1)
    """Save and stop after this step, as after Ctrl-C (exit code 75); --ckpt.resume auto goes on from it."""
    output_dir: AbsolutePath = Field(default="outputs/rl", validate_default=True)
    """Run directory: everything that the run writes goes there."""
    ckpt: CkptConfig | None = None
    self_check: bool = True
    """Refuse a model whose logprobs differ alone, in micro-batches, or on the servers; off: train anyway."""
    log_format: Literal["text", "json"] = "text"
    """Lines of logs/: text, or a JSON object each, with time, level, role and message."""

    def run_directory(self) -> "RunDirectory":
        """The run directory."""
        from cairn.run.directory import RunDirectory  # imports numpy, which would slow down --help

        return RunDirectory(Path(self.output_dir), self.ckpt.dir if self.ckpt else None)

    @property
    def validated_at(self) -> Mapping[str, int]:
        """By name, the interval of each validation."""
        return {}

    @property
    def patiences(self) -> Mapping[str, int]:
        """By name, the validations that may end the run early, with the patience of each."""
        return {}

    def sharing(self, **values: Any) -> Self:
        """A copy with other values, in every role that has these settings."""
        return self.model_copy(update=values)


# Settings of supervision: detecting hung processes, restarting them, and machines that are taken away.


class PreemptionConfig(BaseConfig):
    """Machines that are taken away at short notice, such as spot instances."""

    watch: str | None = None
    """Who tells: aws, gcp, azure, or module:function, called every few seconds (default: only signals)."""
    url: str | None = None
    """Address of the cloud's metadata service, if it is not the usual one."""
    interval: float = Field(default=5, gt=0)
    """Seconds between two questions."""
    seconds: float | None = Field(default=None, gt=0)
    """Time left after SIGTERM or a notice, and at most after one that says less (default: no limit)."""


class SupervisionConfig(BaseConfig):
    """How processes are watched and restarted."""

    max_restarts: int = Field(default=3, ge=0)
    """Restarts of a role without a new finished step before the run fails."""
    heartbeat_timeout: float = Field(default=60, gt=5)
    """Seconds without a heartbeat after which a role is restarted, for example after SIGSTOP."""
    hang_timeout: float = Field(default=600, gt=5)
    """Seconds in one activity, such as a micro-batch, after which a role is restarted."""
    standby: bool = False
    """Keep a second trainer driver and orchestrator ready, to take over within two seconds."""
    preemption: PreemptionConfig | None = None
    sinks: SinksConfig = SinksConfig()


def _checked(value: Any) -> Any:
    if isinstance(value, list):
        value = gpu_list([str(name) for name in cast("list[Any]", value)])
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value  # the type's own check will report it
    text = "".join(str(value).split())
    names = gpu_names(text)
    if text == "" or names == () or text.startswith("-"):
        raise ValueError(
            f"{value!r} is neither a number of GPUs (2) nor a list of them (0,1 or GPU-5ab1; one alone: 3,)"
        )
    if names is not None and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{value!r} names GPU {twice} twice")
    return text


Gpus = Annotated[str | None, BeforeValidator(_checked)]
"""How many GPUs, or which; None leaves it to `cairn.launch.plan.gpu_assignment`."""


# Settings of jobs of Slurm's.


TIME = re.compile(r"\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE")
"""A time limit as sbatch takes it."""


class SlurmConfig(BaseConfig):
    """Submit the run as a job of Slurm's, which is queued again until the run is complete."""

    nodes: int = Field(default=1, ge=1)
    """Nodes of the job; on more than one, the trainer's ranks are spread over them by Ray."""
    gpus_per_node: int | None = Field(default=None, ge=1)
    """GPUs of each node."""
    cpus_per_task: int | None = Field(default=None, ge=1)
    """CPUs of each node (default: 8 for each of gpus_per_node, unless extra asks for CPUs)."""
    mem: str | None = None
    """Memory of each node, such as 500G, or 0 for all of it."""
    time: str | None = None
    """Time limit, such as 24:00:00 or 2-12 (days and hours)."""
    partition: str | None = None
    """Partition."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    job_name: str | None = None
    """Name of the job (default: the last part of the output folder)."""
    signal_seconds: int = Field(default=120, ge=1, le=65535)
    """Seconds before the time limit at which the run saves and stops: more than a step and a save take."""
    requeue: bool = True
    """Queue the job again when the run was stopped after saving (exit code 75), and when a node fails."""
    interface: str | None = None
    """Network interface between the nodes, such as ib0 (default: what Ray, NCCL and gloo choose)."""
    setup: list[str] = []
    """Lines of shell before the run, such as "module load cuda"."""
    extra: list[str] = []
    """Further options of sbatch, such as exclusive or constraint=h100."""
    runner: str | None = None
    """Command in front of Cairn's and Ray's, such as "uv run" (default: the environment of this command)."""

    @field_validator("*")
    @classmethod
    def _on_one_line(cls, value: str | int | list[str] | None) -> str | int | list[str] | None:
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, str) and ("\n" in part or not part.strip()):
                raise ValueError(f"{part!r} must be one line, and not empty")
        return value

    @field_validator("time")
    @classmethod
    def _a_time(cls, value: str | None) -> str | None:
        if value is not None and not TIME.fullmatch(value):
            raise ValueError(f"{value!r} is no time limit such as 90 (minutes), 24:00:00 or 2-12:00")
        return value

    @field_validator("extra")
    @classmethod
    def _as_options(cls, value: list[str]) -> list[str]:
        words = [line.removeprefix("#SBATCH").strip() for line in value]
        return [word if word.startswith("-") else f"--{word}" for word in words]


class RLSlurmConfig(SlurmConfig):
    """Submit the run as a job of Slurm's, which is queued again until the run is complete."""

    server_nodes: int | None = Field(default=None, ge=1)
    """Of several nodes, how many serve and don't train (default: what makes the run fast; 1 on CPUs)."""


# Commands that look at runs and checkpoints


class ToolCommand(BaseConfig, ABC):
    """A command on checkpoints or runs: its arguments, and what it does."""

    command: ClassVar[str]
    """The command, as users type it."""
    exclusive: ClassVar[tuple[str, ...]] = ()
    """Fields of which one may be given."""
    as_json: bool = Field(default=False, validation_alias="json")
    """Print JSON."""

    @abstractmethod
    def execute(self) -> int:
        """Do it; returns the exit code."""

    @model_validator(mode="after")
    def _one_of_exclusive(self) -> Self:
        given = [f"--{name}" for name in self.exclusive if name in self.model_fields_set]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: give one of them")
        return self


def place(text: str) -> Path | str:
    """A path, or the URL of an object store, which a path would change.

    Raises:
        ValueError: it is another URL.
    """
    if is_url(text):
        return text
    if "://" in text:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"{text.partition('://')[0]}:// is no object store; known are {known}")
    return Path(text)


def _local(text: str) -> Path:
    """A run directory, which can't be a URL.

    Raises:
        ValueError: it is one.
    """
    if isinstance(found := place(text), str):
        raise ValueError(
            f"{text} is a URL, where neither rollouts nor a ledger are kept; give the run's local folder"
        )
    return found


Place = Annotated[Path | str, BeforeValidator(place)]
"""A path, or the URL of an object store."""
LocalRun = Annotated[Path, BeforeValidator(_local)]
"""A run directory."""


class RolloutKey(NamedTuple):
    """Names an answer, as the first column of the table does."""

    step: int
    place: int
    sample: int

    def __str__(self) -> str:
        return f"{self.step}/{self.place}/{self.sample}"

    @classmethod
    def of(cls, text: str) -> "RolloutKey":
        """The key in STEP/PLACE/SAMPLE.

        Raises:
            ValueError: it is none.
        """
        try:
            step, place, sample = map(int, text.split("/"))
        except ValueError:
            raise ValueError(
                f"{text!r} is not a key such as 12/190/3: step, place and sample, as in the table"
            ) from None
        return cls(step, place, sample)


GivenRollout = Annotated[RolloutKey, BeforeValidator(RolloutKey.of)]
"""The key of a rollout, as users type it."""
