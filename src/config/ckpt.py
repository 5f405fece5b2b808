# Values that nobody has checked yet have no types.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""When to save, where, and what to go on from."""

import os
from typing import Any, Literal

from pydantic import AliasChoices, Field, field_validator, model_validator

from cairn.config.base import BaseConfig

ACCEPTABLE = ("data", "batch_size", "shuffle", "environment", "prompts_per_step", "samples_per_prompt")
"""The changes of a run's recipe that a resumed run makes only if it is told to."""


class CkptConfig(BaseConfig):
    """Checkpoints; --ckpt on its own saves the final step."""

    interval: int | None = Field(default=None, ge=1)
    """Save every N steps; default: the final step only, which is always saved."""
    dir: str | None = None
    """Folder of the step_N folders; default: checkpoints in the output folder."""
    resume_step: int | None = Field(default=None, ge=1)
    """Resume from this step of the run; later steps are set aside. -1 is `resume = latest`."""
    resume: str | None = None
    """latest (an error if there is none), auto (resume, or start), or the path of a step_N folder."""
    accept_changes: list[str] = []
    """Changes to accept although they break a promise of the run, such as data,batch_size."""
    interval_minutes: float | None = Field(default=None, gt=0)
    """Also save at least every N minutes."""
    save_async: bool = True
    """Write while training continues; false waits until each save is committed."""
    training_state: bool = True
    """False saves weights only, which can start a run but not resume one."""
    keep_last: int | None = Field(default=None, ge=1, validation_alias=AliasChoices("keep_last", "keep"))
    """Keep the newest N steps; default: all, unless keep_best is given."""
    keep_every: int | None = Field(default=None, ge=1)
    """Keep multiples of N for ever."""
    keep_best: int | None = Field(default=None, ge=1)
    """Keep the N best steps by the metric."""
    metric: str | None = None
    """Metric that keep_best uses, such as loss or reward/mean."""
    mode: Literal["min", "max"] | None = None
    """Whether smaller or larger values of the metric are better."""
    milestones: list[int] = []
    """Keep these steps for ever."""
    verify: Literal["load", "save", "off"] = "load"
    """Check all bytes when loading; save: also read them back when saving; off: sizes only."""
    part_timeout: float = Field(default=300, gt=0)
    """Seconds to wait for another rank's or role's part of a checkpoint."""

    @field_validator("dir", "resume")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return value if value in (None, "auto", "latest") else os.path.abspath(value)

    @field_validator("accept_changes")
    @classmethod
    def _known_changes(cls, value: list[str]) -> list[str]:
        names = [name.strip().replace("-", "_") for part in value for name in part.split(",")]
        for name in names:
            if name not in ACCEPTABLE:
                raise ValueError(f"{name!r} is none of {', '.join(ACCEPTABLE)}")
        return names

    @model_validator(mode="before")
    @classmethod
    def _minus_one_is_latest(cls, data: Any) -> Any:
        """What prime-rl's users are used to."""
        if not isinstance(data, dict) or str(data.get("resume_step")) != "-1" or data.get("resume"):
            return data
        return {**data, "resume_step": None, "resume": "latest"}

    @model_validator(mode="after")
    def _best_by_something(self) -> "CkptConfig":
        if self.keep_best is not None and (self.metric is None or self.mode is None):
            raise ValueError(
                f"keep_best = {self.keep_best} needs metric and mode, such as metric = 'loss', mode = 'min'"
            )
        return self

    @model_validator(mode="after")
    def _one_way_to_resume(self) -> "CkptConfig":
        if self.resume_step is not None and self.resume is not None:
            raise ValueError(
                f"resume_step = {self.resume_step} and resume = {self.resume!r} both say where to go on "
                "from; give one of them"
            )
        return self

    def resuming_by_itself(self) -> "CkptConfig":
        """The same, but going on from the newest good step, if there is one."""
        return self.model_copy(update={"resume_step": None, "resume": "auto"})

    @property
    def resumes(self) -> bool:
        """Whether the user asked to go on from an earlier step."""
        return self.resume_step is not None or self.resume is not None
