"""Settings of evaluations, which are never trained on."""

from typing import Any

from pydantic import Field, field_validator, model_validator

from cairn.config.base import BaseConfig
from cairn.config.environment import EnvironmentConfig
from cairn.config.sampling import checked_stop


class EvalSamplingConfig(BaseConfig):
    """How the answers of an evaluation are sampled."""

    temperature: float = Field(default=1.0, ge=0, le=2, allow_inf_nan=False)
    """Softmax temperature, 0 to 2; 0 always takes the likeliest token."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of an answer (default: as in training)."""
    stop: list[str] | None = None
    """Texts at which an answer ends (default: as in training)."""

    @field_validator("stop", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> list[str] | None:
        return None if value is None else list(checked_stop(value))


class EvalConfig(BaseConfig):
    """Problems that policies of the run answer at an interval, with seeds of their own."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Names the evaluation in evals.jsonl and metrics: letters, digits and _.- only."""
    environment: EnvironmentConfig = EnvironmentConfig()
    interval: int = Field(default=50, ge=1)
    """Evaluate after every N steps; the first and the last policy are evaluated as well."""
    problems: int | None = Field(default=None, ge=1)
    """Only the environment's first N problems (default: all)."""
    samples: int = Field(default=1, ge=1)
    """Answers to each problem."""
    right_from: float = 1.0
    """An answer counts as right, for pass@k, if its reward is at least this."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()

    @model_validator(mode="after")
    def _greedy_answers_are_the_same(self) -> "EvalConfig":
        if self.sampling.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"samples = {self.samples} with sampling.temperature = 0: the answers to a problem would "
                "all be the same; take samples = 1, or a temperature above 0"
            )
        return self
