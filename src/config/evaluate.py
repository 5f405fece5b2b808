"""Settings of the `eval` command."""

import os
from typing import ClassVar, Self

from pydantic import Field, field_validator

from cairn.config.environment import EnvironmentConfig, SamplingConfig
from cairn.config.inference import InferenceConfig
from cairn.config.orchestrator import OrchestratorConfig

LISTED = frozenset(
    {
        "model", "eval", "seed", "inference_url", "sampling", "tool_parser",
        "reasoning_parser", "reward_threads", "reward_timeout", "reward_retries", "reward_retry_seconds",
        "max_in_flight", "server_timeout", "request_timeout", "dry_run", "machine",
    }
)  # fmt: skip
"""The orchestrator's settings that say anything about an evaluation; a file may hold the others as well."""


class AnswersConfig(SamplingConfig):
    """How answers are sampled; each evaluation has a temperature of its own."""

    unlisted = SamplingConfig.unlisted | {"temperature"}


class EvaluateConfig(OrchestratorConfig):
    """Evaluates steps of a run, or any models: the numbers that [[eval]] gives during training, afterwards.

    Takes the orchestrator's settings, and so its file. What is not given is as in the run whose step is the
    first model.
    """

    shared: ClassVar[dict[str, tuple[str, ...]]] = {"inference": ("model", "dry_run", "machine")}
    unlisted = frozenset(OrchestratorConfig.model_fields) - LISTED
    # A frozen model's fields are as good as read-only.
    sampling: AnswersConfig = AnswersConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    models: list[str] = []
    """Several models, one after the other, each like --model.name."""
    all: str | None = None
    """A run directory, or its URL in an object store: evaluate all steps that are there."""
    env: EnvironmentConfig | None = None
    """An environment to evaluate in, instead of [[eval]]."""
    problems: int | None = Field(default=None, ge=1)
    """Only the first N problems, in every evaluation (default: as each says)."""
    samples: int | None = Field(default=None, ge=1)
    """Answers to each problem, in every evaluation (default: as each says)."""
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    """Softmax temperature, in every evaluation (default: as each says); 0 takes the likeliest token."""
    take_server: bool = False
    """Load the models into a given server although it serves the policy of a run that may be going on."""
    as_json: bool = Field(default=False, validation_alias="json")
    """Print the results as JSON; everything else goes to standard error."""
    out: str = Field(default="outputs/evals", validate_default=True)
    """Folder for results and answers; the same command with the same folder goes on where it was ended."""
    inference: InferenceConfig = InferenceConfig()
    """The server that is started unless --inference-url names one; its port is a free one by default."""

    @field_validator("models")
    @classmethod
    def _names(cls, value: list[str]) -> list[str]:
        if not all(value):
            raise ValueError("an empty name is no model")
        return value

    @field_validator("out")
    @classmethod
    def _absolute_folder(cls, value: str) -> str:
        return os.path.abspath(value)

    def settled(self, *, gpu: bool = False, gpu_servers: bool) -> Self:
        server = self.inference.settled(gpu=gpu, gpu_servers=gpu_servers)
        return super().settled(gpu=gpu, gpu_servers=gpu_servers).model_copy(update={"inference": server})
