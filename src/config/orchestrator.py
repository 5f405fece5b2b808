# Unchecked values have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Settings of the orchestrator: prompts, rollouts, rewards, batches."""

from typing import Any, ClassVar, Self, cast

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from cairn.config.base import BaseConfig
from cairn.config.shared import SharedConfig


class EnvironmentConfig(BaseConfig):
    """Where prompts and rewards come from."""

    arguments_of: ClassVar[dict[str, str]] = {"name": "args"}
    """Another name means another environment, to which the arguments given for the first do not apply."""
    name: str = "reverse_text"
    """A built-in environment (reverse_text), or your own as module:Class."""
    args: dict[str, Any] = {}
    """Arguments of the environment's constructor, such as its number of problems."""


class SamplingConfig(BaseConfig):
    """How answers are sampled."""

    unlisted = frozenset({"top_p"})
    temperature: float = Field(default=1.0, ge=0.01, le=2, allow_inf_nan=False)
    """Softmax temperature, 0.01 to 2; the loss takes it into account."""
    top_p: float = 1.0
    """Must be 1.0: a policy gradient needs samples from the whole distribution; lower the temperature."""
    max_tokens: int = Field(default=256, ge=1)
    """Maximum tokens of an answer."""
    chunk_tokens: int = Field(default=512, ge=1)
    """Tokens per request: after a crash, an answer continues from its last complete piece of this size."""

    @field_validator("top_p")
    @classmethod
    def _whole_distribution(cls, value: float) -> float:
        # With top-p, the server's logprobs are those of the renormalised nucleus, but the trainer's are of
        # the whole vocabulary, so every ratio would be too small by the nucleus's mass. Using the whole
        # vocabulary on both sides would not help: the samples would still come from another distribution,
        # which never produces the tokens outside the nucleus. (DeepSeek-V3.2, arXiv:2512.02556, "Keep
        # Sampling Mask", applies the sampler's mask of each token in the loss; servers don't return that
        # mask.)
        if value != 1.0:
            raise ValueError(
                "RL needs answers from the whole distribution (1.0): the loss compares each token's "
                "probability now with its probability when it was sampled, and sampling from a part of the "
                "vocabulary makes all of these ratios wrong. For safer answers lower sampling.temperature, "
                "which the loss takes into account"
            )
        return value


class AdvantageConfig(BaseConfig):
    """How the answers to a prompt are compared with each other."""

    arguments_of: ClassVar[dict[str, str]] = {"type": "args"}
    """The arguments of one type do not apply to another."""
    type: str = "grpo"
    """grpo, or your own as module:Class."""
    args: dict[str, Any] = {}
    """Arguments of the advantage; grpo: normalize, whether to divide by the standard deviation (true)."""


class OrchestratorConfig(SharedConfig):
    """The orchestrator: prompts, rollouts, rewards, advantages and batches."""

    unlisted = frozenset({"normalize_advantages", "colocated"})
    inference_url: list[str] = []
    """Addresses of running servers; if none is given, rl starts one with the settings in [inference]."""
    environment: EnvironmentConfig = EnvironmentConfig()
    sampling: SamplingConfig = SamplingConfig()
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts in one batch (one optimiser step)."""
    samples_per_prompt: int = Field(default=8, ge=2)
    """Answers to each prompt; each answer's advantage is relative to the others."""
    reward_threads: int = Field(default=1, ge=0)
    """Threads that call the environment; 0: call it on the event loop, which blocks everything else."""
    reward_timeout: float = Field(default=600, gt=0)
    """Seconds that a call of the environment (messages or reward) may take."""
    max_off_policy_steps: int = Field(default=1, ge=0)
    """Maximum age of the sampling policy, in steps; with 0, generation and training alternate."""
    recompute_kv_cache: bool = False
    """Recompute the KV cache of unfinished answers whenever new weights are loaded."""
    advantage: AdvantageConfig = AdvantageConfig()
    normalize_advantages: bool | None = None
    """Earlier name of advantage.args.normalize."""
    max_in_flight: int | None = Field(default=None, ge=1)
    """Maximum number of answers in progress at the same time (default: 256, or 1024 for servers on GPUs)."""
    server_timeout: float | None = Field(default=None, gt=0)
    """Seconds to wait for servers to become healthy (default: 300, or 1800 for servers on GPUs)."""
    request_timeout: float = Field(default=600, gt=0)
    """Seconds to wait for an answer, including retries of failed requests."""
    version_timeout: float = Field(default=1800, gt=0)
    """Seconds to wait for the trainer's next policy."""
    colocated: bool = False
    """Have the servers sleep while a step is trained; rl --colocate sets it."""

    def settled(self, *, gpu: bool = False, gpu_servers: bool) -> Self:
        if gpu_servers:
            return self.left_to(max_in_flight=1024, server_timeout=1800.0)
        return self.left_to(max_in_flight=256, server_timeout=300.0)

    @model_validator(mode="before")
    @classmethod
    def _one_name_for_normalize(cls, data: Any) -> Any:
        """Move `normalize_advantages`, a setting from before there were types of advantages, to its place."""
        if not isinstance(data, dict):
            return data
        settings = cast("dict[str, Any]", data)
        if settings.get("normalize_advantages") is None:
            return settings
        try:
            normalize = TypeAdapter(bool).validate_python(settings["normalize_advantages"])
            advantage = AdvantageConfig.model_validate(settings.get("advantage") or {})
        except ValidationError:
            return settings  # the checks of the fields will report the mistake
        if advantage.type != "grpo":
            raise ValueError(
                f"normalize_advantages is an argument of grpo, but advantage.type = {advantage.type!r}: "
                "remove it, and set advantage.args as that type requires"
            )
        args = {key: value for key, value in advantage.args.items() if key != "normalize"}
        if not normalize:  # true is the default
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
