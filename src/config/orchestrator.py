# Unchecked values have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Settings of the orchestrator (prompts, rollouts, rewards, batches), and of `eval`, which takes them."""

from typing import Any, ClassVar, Self, cast

from pydantic import Field, field_validator, model_validator

from cairn.config.environment import (
    CHUNK_TOKENS,
    COMPARING,
    GAE,
    NOT_SHAPED,
    AdvantageConfig,
    EnvironmentConfig,
    EvalConfig,
    MixedEnvironmentConfig,
    OverlongConfig,
    PoolsConfig,
    SamplingConfig,
)
from cairn.config.inference import InferenceConfig
from cairn.config.settings import AbsolutePath, refuse_twins
from cairn.config.shared import SharedConfig

IN_FLIGHT = 256
"""Answers in progress for each server: with many more, those of an 8B model do not fit into the KV cache of
one GPU with 80 GiB at a few thousand tokens each, and are computed again whenever others displace them."""


class OrchestratorConfig(SharedConfig):
    """The orchestrator: prompts, rollouts, rewards, advantages and batches."""

    unlisted = frozenset({"colocated", "teachers", "router_replay", "siblings", "branched_at"})
    inference_url: list[str] = []
    """Addresses of running servers; if none is given, rl starts its own with the settings in [inference]."""
    environment: EnvironmentConfig = EnvironmentConfig()
    environments: list[MixedEnvironmentConfig] = []
    """Several environments, as [[environments]] tables in the place of [environment]."""
    sampling: SamplingConfig = SamplingConfig()
    tool_parser: str | None = None
    """vLLM's parser of the model's tool calls, such as hermes; environments with tools need one."""
    reasoning_parser: str | None = None
    """vLLM's parser of reasoning, such as qwen3; without one, reasoning is part of an answer's text."""
    eval: list[EvalConfig] = []
    """Evaluations of the run's policies, as [[eval]] tables; see docs/how-to/evaluation.md."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts in one batch (one optimiser step)."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Answers to each prompt; most advantages compare them, and need two or more."""
    redraw: int = Field(default=0, ge=0)
    """Prompts per step that other prompts replace because all their answers have the same reward."""
    reward_threads: int = Field(default=1, ge=0)
    """Threads that call the environment; 0: call it on the event loop, which blocks everything else."""
    reward_timeout: float = Field(default=600, gt=0)
    """Seconds that a call of the environment may take; a program, between two answers of the model."""
    reward_retries: int = Field(default=3, ge=0)
    """How often a failed call of the environment is tried again before its answer counts as failed."""
    reward_retry_seconds: float = Field(default=1.0, ge=0)
    """Seconds before the first such try; before each further one twice as long, up to a minute."""
    max_failed_prompts: int = Field(default=8, ge=1)
    """Prompts in a row, too many of whose answers failed to learn from any, that end the run."""
    max_failed_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the run's prompts that may be given up; with more, the finished run ends with exit code 1."""
    keep_rollouts_gb: float = Field(default=10, ge=0, allow_inf_nan=False)
    """Gigabytes of shipped answers to keep in rollouts/, and of each evaluation's below evals/; those of the
    oldest steps go first. 0 keeps none."""
    max_off_policy_steps: int = Field(default=1, ge=0)
    """Maximum age of the sampling policy, in steps; with 0, generation and training alternate."""
    recompute_kv_cache: bool = False
    """Recompute the KV cache of unfinished answers whenever new weights are loaded."""
    advantage: AdvantageConfig = AdvantageConfig()
    overlong: OverlongConfig = OverlongConfig()
    pools: PoolsConfig = PoolsConfig()
    max_in_flight: int | None = Field(default=None, ge=1)
    """Maximum number of answers in progress at the same time (default: 256 for each server)."""
    server_timeout: float | None = Field(default=None, gt=0)
    """Seconds to wait for servers to become healthy (default: 300, or 1800 for servers on GPUs)."""
    request_timeout: float = Field(default=600, gt=0)
    """Seconds to wait for a server, and for an answer as many for each 512 tokens that it may have."""
    weight_fan_out: int = Field(default=4, ge=0)
    """Servers that get a policy from the trainer's memory; each hands it on to as many others. 0: all do."""
    version_timeout: float = Field(default=1800, gt=0)
    """Seconds to wait for the trainer's next policy."""
    teachers: dict[str, str] = {}
    """The models that score batches, by column; the trainer's kl and distill set it."""
    router_replay: bool = False
    """Keep the experts that servers choose for each token, for the trainer; trainer.router_replay sets it."""
    colocated: bool = False
    """Have the servers sleep while a step is trained; rl --colocate sets it."""
    siblings: dict[str, str] = {}
    """The run directories of other branches whose answers may be taken, by name; rl --branch sets it."""
    branched_at: int = Field(default=0, ge=0)
    """The step from which all these branches have started; rl --branch sets it."""

    @property
    def spared_batches(self) -> int:
        """The last batch that may have answers which other branches may take; 0 if there are no others."""
        return self.branched_at + 1 + 2 * self.max_off_policy_steps if self.siblings else 0

    def settled(self, *, gpu: bool = False, gpu_servers: bool) -> Self:
        sampling = self.sampling.left_to(chunk_tokens=8192 if gpu_servers else CHUNK_TOKENS)
        settled = self.model_copy(update={"sampling": sampling})
        in_flight = IN_FLIGHT * max(1, len(self.inference_url))
        return settled.left_to(max_in_flight=in_flight, server_timeout=1800.0 if gpu_servers else 300.0)

    def of_environments(self) -> list[Self]:
        """For each environment, the settings by which it is asked and its prompts are answered."""
        if not self.environments:
            return [self]
        return [self._of(one) for one in self.environments]

    def _of(self, one: MixedEnvironmentConfig) -> Self:
        changed: dict[str, Any] = {
            "environment": EnvironmentConfig(name=one.name, args=one.args, label=one.label),
            "environments": [],
        }
        own = {name: getattr(one.sampling, name) for name in ("max_tokens", "stop")}
        if own := {name: value for name, value in own.items() if value is not None}:
            changed["sampling"] = self.sampling.model_copy(update=own)
        for name in ("samples_per_prompt", "advantage", "overlong", "pools"):
            if (own := getattr(one, name)) is not None:
                changed[name] = own
        return self.model_copy(update=changed)

    def of_evaluation(self, evaluation: EvalConfig) -> Self:
        """The settings by which an evaluation asks its environment and samples answers."""
        own = evaluation.sampling
        sampling: dict[str, Any] = {"temperature": own.temperature}
        sampling |= {
            name: getattr(own, name) for name in ("max_tokens", "stop") if getattr(own, name) is not None
        }
        changed = {
            "environment": evaluation.environment,
            "environments": [],
            "sampling": self.sampling.model_copy(update=sampling),
            "samples_per_prompt": evaluation.samples,
            "router_replay": False,
        }
        return self.model_copy(update=changed)

    @field_validator("eval")
    @classmethod
    def _names_of_their_own(cls, value: list[EvalConfig]) -> list[EvalConfig]:
        refuse_twins("evaluations", "name", [one.name for one in value])
        return value

    @field_validator("environments")
    @classmethod
    def _labels_of_their_own(cls, value: list[MixedEnvironmentConfig]) -> list[MixedEnvironmentConfig]:
        refuse_twins("environments", "label", [one.called for one in value])
        return value

    @model_validator(mode="after")
    def _buffer_within_answers(self) -> Self:
        for one in self.of_environments():
            shape, longest = one.overlong, one.sampling.max_tokens
            if shape.type == "shape" and shape.buffer > longest:
                raise ValueError(
                    f"overlong.buffer = {shape.buffer} is more than sampling.max_tokens = {longest} of "
                    f"environment {one.environment.called!r}: give the last tokens of an answer over which "
                    "its punishment grows"
                )
        return self

    @model_validator(mode="after")
    def _advantages_fit(self) -> Self:
        for one in self.of_environments():
            kind, called = one.advantage.type, one.environment.called
            if one.samples_per_prompt == 1 and kind in COMPARING:
                raise ValueError(
                    f"samples_per_prompt = 1, and advantage.type = {kind!r} compares the answers to a "
                    f"prompt, of which environment {called!r} would have one: give 2 or more, or take "
                    "reinforce_plus_plus, which compares the answers of the whole batch"
                )
            if one.overlong.type == "shape" and kind in NOT_SHAPED:
                raise ValueError(
                    f"overlong.type = 'shape' and advantage.type = {kind!r} of environment {called!r} don't "
                    f"go together: {NOT_SHAPED[kind]}. Choose overlong.type = 'mask', or another advantage"
                )
        return self

    @property
    def advantage_types(self) -> set[str]:
        """Those of all environments."""
        return {one.advantage.type for one in self.of_environments()}

    @model_validator(mode="after")
    def _all_by_the_critic_or_none(self) -> Self:
        types = self.advantage_types
        if GAE in types and len(types) > 1:
            others = ", ".join(sorted(types - {GAE}))
            raise ValueError(
                f"advantage.type = {GAE!r} of some environments, and {others} of others: the advantages of a "
                "batch all come from the trainer's critic, or none do. Give all environments the same type"
            )
        return self

    @model_validator(mode="after")
    def _one_environment_or_several(self) -> Self:
        if self.environments and self.environment != EnvironmentConfig():
            several = ", ".join(one.called for one in self.environments)
            raise ValueError(
                f"environment.name = {self.environment.name!r} beside environments ({several}): give "
                "[environment], or [[environments]], not both"
            )
        return self

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


# Settings of the `eval` command.


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
    out: AbsolutePath = Field(default="outputs/evals", validate_default=True)
    """Folder for results and answers; the same command with the same folder goes on where it was ended."""
    inference: InferenceConfig = InferenceConfig()
    """The server that is started unless --inference-url names one; its port is a free one by default."""

    @field_validator("models")
    @classmethod
    def _names(cls, value: list[str]) -> list[str]:
        if not all(value):
            raise ValueError("an empty name is no model")
        return value

    def settled(self, *, gpu: bool = False, gpu_servers: bool) -> Self:
        server = self.inference.settled(gpu=gpu, gpu_servers=gpu_servers)
        return super().settled(gpu=gpu, gpu_servers=gpu_servers).model_copy(update={"inference": server})
