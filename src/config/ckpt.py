"""When to save, where, and what to go on from."""

from pydantic import Field, model_validator
from pydantic_config import BaseConfig


class CkptConfig(BaseConfig):
    """Checkpoints; the bare flag --ckpt saves the final step."""

    interval: int | None = Field(None, ge=1)
    """Save every N steps; default: the final step only, which is always saved."""
    dir: str | None = None
    """Folder of the step_N folders; default: checkpoints in the output folder."""
    resume_step: int | None = Field(None, ge=1)
    """Go on from this step of the run; later steps are set aside."""
    resume: str | None = None
    """latest (an error if there is none), auto (go on, or start fresh), or the path of a step_N folder."""
    part_timeout: float = Field(300, gt=0)
    """Seconds to wait for the other role's part of a checkpoint."""

    @model_validator(mode="after")
    def _one_way_to_resume(self) -> "CkptConfig":
        if self.resume_step is not None and self.resume is not None:
            raise ValueError(
                f"resume_step = {self.resume_step} and resume = {self.resume!r} both say where to go on "
                "from; give one of them"
            )
        return self

    @property
    def resumes(self) -> bool:
        """Whether the user asked to go on from an earlier step."""
        return self.resume_step is not None or self.resume is not None
