# Values that nobody has checked yet have no types.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Configuration of the orchestrator: prompts, rollouts, rewards, batches."""

from typing import Any, ClassVar, cast

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from cairn.config.base import BaseConfig
from cairn.config.shared import SharedConfig


class EnvironmentConfig(BaseConfig):
    """The source of prompts and rewards."""

    arguments_of: ClassVar[dict[str, str]] = {"name": "args"}
    """Another name is another environment, whose arguments are not those that were given for the first."""
    name: str = "reverse_text"
    """A built-in environment, or your own module:Class."""
    args: dict[str, Any] = {}
    """Arguments of the environment, such as the number of prompts."""


class SamplingConfig(BaseConfig):
    """How answers are sampled."""

    unlisted = frozenset({"top_p"})
    temperature: float = Field(default=1.0, ge=0.01, le=2, allow_inf_nan=False)
    """Softmax temperature of sampling; the loss uses it too. vLLM takes none beyond these bounds."""
    top_p: float = 1.0
    """Must be 1.0: a policy gradient needs answers from the whole distribution; lower the temperature."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest answer, in tokens."""
    chunk_tokens: int = Field(default=512, ge=1)
    """Tokens requested at once; after a crash an answer continues from its last complete piece."""

    @field_validator("top_p")
    @classmethod
    def _whole_distribution(cls, value: float) -> float:
        # The server's logprobs are those of the renormalised nucleus; the trainer's are of the whole
        # vocabulary, so that every ratio would be too small by the nucleus's mass. Nor would comparing both
        # over the whole vocabulary do: the samples would still come from another distribution, which never
        # takes the tokens outside (DeepSeek-V3.2, arXiv:2512.02556, "Keep Sampling Mask": it takes the
        # sampler's mask of each token, which servers don't return).
        if value != 1.0:
            raise ValueError(
                "RL needs answers from the whole distribution (1.0): the loss compares each token's "
                "probability now with that when it was sampled, and sampling from a part of the vocabulary "
                "makes all of these ratios wrong. For safer answers lower sampling.temperature, which the "
                "loss takes into account"
            )
        return value


class AdvantageConfig(BaseConfig):
    """How the answers to a prompt are compared: what the trainer learns by."""

    arguments_of: ClassVar[dict[str, str]] = {"type": "args"}
    """Those of one type mean nothing to another."""
    type: str = "grpo"
    """grpo, or your own module:Class."""
    args: dict[str, Any] = {}
    """Arguments of the advantage; grpo has normalize, to divide by the rewards' standard deviation (true)."""


class OrchestratorConfig(SharedConfig):
    """The orchestrator: prompts, rollouts, rewards, advantages and batches."""

    unlisted = frozenset({"normalize_advantages"})
    inference_url: list[str] = []
    """Address of one or several running servers; without it, rl starts one from [inference]."""
    environment: EnvironmentConfig = EnvironmentConfig()
    sampling: SamplingConfig = SamplingConfig()
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts in one batch."""
    samples_per_prompt: int = Field(default=8, ge=2)
    """Answers to each prompt; advantages are relative to the others in this group."""
    reward_threads: int = Field(default=1, ge=0)
    """Calls of the environment at once, each in a thread; 0: in the main thread, where all else waits."""
    reward_timeout: float = Field(default=600, gt=0)
    """Seconds that a reward, or a problem's messages, may take."""
    max_off_policy_steps: int = Field(default=1, ge=0)
    """Steps by which a token's policy may lag behind; with 0, generation and training alternate."""
    recompute_kv_cache: bool = False
    """Recompute the KV cache of answers in progress whenever new weights are loaded."""
    advantage: AdvantageConfig = AdvantageConfig()
    normalize_advantages: bool | None = None
    """Another name for advantage.args.normalize."""
    max_in_flight: int = Field(default=256, ge=1)
    """Maximum number of requests in progress."""
    server_timeout: float = Field(default=300, gt=0)
    """Seconds to wait for servers to become healthy."""
    request_timeout: float = Field(default=600, gt=0)
    """Seconds to wait for an answer, and to retry a failed request."""
    version_timeout: float = Field(default=1800, gt=0)
    """Seconds to wait for the trainer's next policy version."""

    @model_validator(mode="before")
    @classmethod
    def _one_name_for_normalize(cls, data: Any) -> Any:
        """Move `normalize_advantages` to its place; it was a setting when there was one advantage only."""
        if not isinstance(data, dict):
            return data
        settings = cast("dict[str, Any]", data)
        if settings.get("normalize_advantages") is None:
            return settings
        try:
            normalize = TypeAdapter(bool).validate_python(settings["normalize_advantages"])
            advantage = AdvantageConfig.model_validate(settings.get("advantage") or {})
        except ValidationError:
            return settings  # the check of each field says what is wrong
        if advantage.type != "grpo":
            raise ValueError(
                f"normalize_advantages is an argument of grpo, and advantage.type = {advantage.type!r}: "
                "leave it out, and give advantage.args what that type takes"
            )
        args = {key: value for key, value in advantage.args.items() if key != "normalize"}
        if not normalize:  # true is the default, and needs no saying
            args["normalize"] = False
        return {
            **settings,
            "advantage": AdvantageConfig(type="grpo", args=args),
            "normalize_advantages": None,
        }

    @field_validator("inference_url", mode="before")
    @classmethod
    def _urls(cls, value: Any) -> Any:
        if not isinstance(value, str | list):
            return value
        urls = [value] if isinstance(value, str) else cast("list[Any]", value)
        for url in urls:
            if not str(url).startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not a URL; write it like http://127.0.0.1:8000")
        return [url.rstrip("/") for url in urls]
