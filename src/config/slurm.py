"""Settings of jobs of Slurm's."""

import re

from pydantic import Field, field_validator

from cairn.config.base import BaseConfig

TIME = re.compile(r"\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE")
"""A time limit as sbatch takes it."""


class SlurmConfig(BaseConfig):
    """Submit the run as a job of Slurm's, which is queued again until the run is complete."""

    nodes: int = Field(default=1, ge=1)
    """Nodes of the job; on more than one, the trainer's ranks are spread over them by Ray."""
    gpus_per_node: int | None = Field(default=None, ge=1)
    """GPUs of each node."""
    cpus_per_task: int | None = Field(default=None, ge=1)
    """CPUs of each node; the job has one task on each."""
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

    server_nodes: int = Field(default=1, ge=1)
    """If there are several nodes: how many of them run an inference server each, not the trainer."""
