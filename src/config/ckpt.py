"""Settings of checkpoints: when and where to save, and what to resume from."""

import os
from typing import Any, Literal

from pydantic import AliasChoices, Field, field_validator, model_validator

from cairn.config.settings import BaseConfig, Size
from cairn.run.object_store import SCHEMES, holds_credentials, is_url, shown

# Settings of exports: checkpoints for other programs, written while training goes on.


class ExportConfig(BaseConfig):
    """Saved steps written for other programs, too, by a process of its own while training goes on."""

    format: str = "hf"
    """Format to write, as of ckpt export --format."""
    interval: int | None = Field(default=None, ge=1)
    """Export the saved steps that are multiples of N, and the last one (default: every saved step)."""
    folder: str | None = None
    """Folder that holds the exported step_N folders (default: exports in the output folder)."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the weights (default: as they are)."""
    quantize: str | None = None
    """Quantisation of the weights, in formats that have one, as of ckpt export --quantize."""
    shard_size: Size | None = None
    """Largest size of a file of weights, such as 2G (default: 5G)."""
    keep: int | None = Field(default=None, ge=1)
    """Keep the newest N exports (default: all)."""
    max_waiting: int = Field(default=2, ge=0)
    """Steps that retention spares while they wait to be exported; further ones are given up."""
    verify: bool = True
    """Read each export back and compare it with the step."""


# Unchecked values have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false


CACHED_STEPS = 2
"""Local steps that are kept if `dir` is a URL."""
ACCEPTABLE = (
    *("data", "batch_size", "shuffle", "loss", "environment", "prompts_per_step", "samples_per_prompt"),
    "batches",  # that are made again, and others than when they were shipped
)
"""Changes of a run's recipe that a resumed run refuses unless they are listed in accept_changes."""


class CkptConfig(BaseConfig):
    """Checkpoints; --ckpt on its own saves the final step."""

    interval: int | None = Field(default=None, ge=1)
    """Save every N steps; the final step is always saved (default: only that one)."""
    dir: str | None = None
    """Folder that holds the step_N folders (default: checkpoints in the output folder)."""
    resume_step: int | None = Field(default=None, ge=1)
    """Resume from this step of the run and set later steps aside; -1 means --ckpt.resume latest."""
    resume: str | None = None
    """latest (error if there is none), auto (resume if there is one, otherwise start), or a step_N path."""
    accept_changes: list[str] = []
    """Changes since the checkpoint to accept although they break a promise, such as data batch_size."""
    interval_minutes: float | None = Field(default=None, gt=0)
    """Also save when N minutes have passed since the last save."""
    memory_interval: int | None = Field(default=None, ge=1)
    """Keep every N-th step in host memory, on another machine, too, if there is one: deaths need no disk."""
    save_async: bool = True
    """Write in the background while training continues; off: wait until each save is committed."""
    training_state: bool = True
    """Save optimiser, scheduler and data position too; off: weights only, which can't be resumed."""
    compress: bool = False
    """Compress the optimiser's state: smaller by a sixth, for processor time; model/ stays as it is."""
    incremental: bool = False
    """Write frozen weights once: later steps have hard links to the same file, which share its damage."""
    keep_last: int | None = Field(default=None, ge=1, validation_alias=AliasChoices("keep_last", "keep"))
    """Keep the newest N steps (default: all, unless keep_best is given)."""
    keep_every: int | None = Field(default=None, ge=1)
    """Also keep every step that is a multiple of N, for ever."""
    keep_best: int | None = Field(default=None, ge=1)
    """Keep the N best steps by `metric`."""
    metric: str | None = None
    """Metric for keep_best, such as loss, reward/mean, or eval/NAME/reward of an evaluation of the step."""
    mode: Literal["min", "max"] | None = None
    """Whether a smaller (min) or a larger (max) metric is better."""
    metric_interval: int | None = Field(default=None, ge=1)
    """The interval of the evaluation that `metric` is of; rl knows it, only `trainer` must be given it."""
    milestones: list[int] = []
    """Also keep these steps, for ever."""
    verify: Literal["load", "save", "off"] = "load"
    """load: verify checksums when loading; save: also read back after saving; off: check sizes only."""
    staging_memory: Size | None = None
    """Host memory for a rank's state on its way to disk, such as 8G (default: all it needs, if there)."""
    part_timeout: float = Field(default=300, gt=0)
    """Seconds to wait for another rank's or role's part of a checkpoint."""
    export: ExportConfig | None = None
    remote: str | None = None
    """A second place for steps, behind the local disk: s3://bucket/prefix, gs://, az:// or file://."""
    remote_interval: int | None = Field(default=None, ge=1)
    """Upload saved steps that are multiples of N (default: all), and always the last one before an end."""
    remote_keep_last: int | None = Field(default=None, ge=1)
    """Keep the newest N remote steps (default: all, unless remote_keep_best is given)."""
    remote_keep_every: int | None = Field(default=None, ge=1)
    """Also keep every remote step that is a multiple of N, for ever."""
    remote_keep_best: int | None = Field(default=None, ge=1)
    """Keep the N best remote steps by `metric`."""
    remote_max_waiting: int = Field(default=2, ge=0)
    """Steps that stay on the local disk, although no rule keeps them, until they are uploaded."""
    remote_timeout: float = Field(default=300, gt=0)
    """Seconds that the end of the run waits for uploads that fail."""
    remote_grace: float = Field(default=60, ge=0)
    """Seconds that a stopped run waits until its newest step is uploaded."""
    remote_bandwidth: Size | None = None
    """Upload at most so many bytes a second, such as 200M (default: no limit)."""

    @field_validator("dir", "resume")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value in (None, "auto", "latest") or is_url(value):
            return value
        if "://" in value:  # of another scheme
            raise ValueError(_no_url(value))
        return os.path.abspath(value)

    @field_validator("remote")
    @classmethod
    def _a_url(cls, value: str | None) -> str | None:
        if value is not None and not is_url(value):
            raise ValueError(_no_url(value))
        return value

    @field_validator("accept_changes")
    @classmethod
    def _known_changes(cls, value: list[str]) -> list[str]:
        names = [name.strip().replace("-", "_") for part in value for name in part.split(",")]
        for name in names:
            if name not in ACCEPTABLE:
                raise ValueError(f"{name!r} is not one of {', '.join(ACCEPTABLE)}")
        return names

    @model_validator(mode="before")
    @classmethod
    def _minus_one_is_latest(cls, data: Any) -> Any:
        """Accept prime-rl's spelling of "resume from the newest step"."""
        if not isinstance(data, dict) or str(data.get("resume_step")) != "-1" or data.get("resume"):
            return data
        return {**data, "resume_step": None, "resume": "latest"}

    @model_validator(mode="before")
    @classmethod
    def _cached(cls, data: Any) -> Any:
        """If dir is a URL, the steps are kept there by the rules, and the local disk is a cache of two."""
        if not isinstance(data, dict) or not isinstance(data.get("dir"), str) or not is_url(data["dir"]):
            return data
        if holds_credentials(data["dir"]):
            return data  # dir itself is refused
        if data.get("remote"):
            raise ValueError(f"dir = {data['dir']!r} is a URL, so there can't be a remote beside it")
        rules = {f"remote_{name}": data.get(name) for name in ("keep_last", "keep_every", "keep_best")}
        rules["remote_keep_last"] = rules["remote_keep_last"] or data.get("keep")
        local = {"keep_last": CACHED_STEPS, "keep": None, "keep_every": None, "keep_best": None}
        kept = {name: value for name, value in data.items() if name not in local}
        return {**kept, **rules, "remote": data["dir"], "dir": None, "keep_last": CACHED_STEPS}

    @model_validator(mode="after")
    def _whole_steps_in_memory(self) -> "CkptConfig":
        other = "training_state = false" if not self.training_state else "incremental = true"
        if self.memory_interval is not None and (self.incremental or not self.training_state):
            raise ValueError(
                f"memory_interval = {self.memory_interval} keeps the whole training state in memory, so it "
                f"can't go with {other}: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _best_by_something(self) -> "CkptConfig":
        for name in ("keep_best", "remote_keep_best"):
            if getattr(self, name) is not None and (self.metric is None or self.mode is None):
                raise ValueError(
                    f"{name} = {getattr(self, name)} needs metric and mode, such as metric = 'loss', "
                    "mode = 'min'"
                )
        return self

    @model_validator(mode="after")
    def _named_metric_of_an_evaluation(self) -> "CkptConfig":
        if self.metric is None or not self.metric.startswith("eval/"):
            if self.metric_interval is not None:
                raise ValueError(
                    f"metric_interval = {self.metric_interval} is for a metric of an evaluation, such as "
                    f"metric = 'eval/NAME/reward', and metric is {self.metric!r}"
                )
        elif not all(self.metric.split("/", 2)[1:]) or self.metric.count("/") != 2:
            raise ValueError(
                f"metric = {self.metric!r} must be eval/NAME/ and a number of evals.jsonl, such as "
                "eval/NAME/reward or eval/NAME/pass@4"
            )
        return self

    @model_validator(mode="after")
    def _remote_settings_have_a_remote(self) -> "CkptConfig":
        names = [name for name in type(self).model_fields if name.startswith("remote_")]
        given = [name for name in names if getattr(self, name) != type(self).model_fields[name].default]
        if given and self.remote is None:
            raise ValueError(f"{min(given)} needs remote, such as remote = 's3://bucket/prefix'")
        if self.remote_interval and self.interval and self.remote_interval % self.interval:
            raise ValueError(
                f"remote_interval = {self.remote_interval} is no multiple of interval = {self.interval}: "
                "only saved steps can be uploaded"
            )
        return self

    @model_validator(mode="after")
    def _exports_what_is_saved(self) -> "CkptConfig":
        wanted = self.export.interval if self.export else None
        if wanted is not None and self.interval is None:
            raise ValueError(
                f"export.interval = {wanted} needs interval: without it only the last step is saved, which "
                "is exported in any case"
            )
        if wanted is not None and self.interval is not None and wanted % self.interval:
            raise ValueError(
                f"export.interval = {wanted} is no multiple of interval = {self.interval}: only saved steps "
                "can be exported"
            )
        return self

    @model_validator(mode="after")
    def _one_way_to_resume(self) -> "CkptConfig":
        if self.resume_step is not None and self.resume is not None:
            raise ValueError(
                f"resume_step = {self.resume_step} and resume = {self.resume!r} both choose the step to "
                "resume from; give only one of them"
            )
        return self

    def resuming_by_itself(self) -> "CkptConfig":
        """The same settings, but resuming from the newest good step, if there is one."""
        return self.model_copy(update={"resume_step": None, "resume": "auto"})

    def remote_rules(self) -> "CkptConfig":
        """The same settings, with the rules for remote steps in place of those for local ones."""
        names = ("keep_last", "keep_every", "keep_best")
        return self.model_copy(update={name: getattr(self, f"remote_{name}") for name in names})

    @property
    def rated_by(self) -> str | None:
        """What the metrics of the evaluation that rates steps begin with, eval/NAME/; None: none does."""
        if self.metric is None or not self.metric.startswith("eval/"):
            return None
        return self.metric.rpartition("/")[0] + "/"

    @property
    def resumes(self) -> bool:
        """Whether the user asked to resume from a checkpoint."""
        return self.resume_step is not None or self.resume is not None


def _no_url(text: str) -> str:
    return f"{shown(text)} is not a URL such as {', '.join(f'{s}://...' for s in SCHEMES)}"
