"""Settings of environments: sampling, length penalties, difficulty pools, advantages and evaluations."""

from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from cairn.config.settings import BaseConfig

# How answers are sampled, and what may end them.


def checked_stop(stop: Any, name: str = "stop") -> tuple[str, ...]:
    """The stop strings that a setting, a program or a request gives: one text, or several; each of them once.

    Raises:
        ValueError: they are none; the message begins with `name`.
    """
    given = cast("list[Any]", [stop] if isinstance(stop, str) or not isinstance(stop, list | tuple) else stop)
    texts = [one for one in given if isinstance(one, str)]
    if len(texts) < len(given):
        raise ValueError(f"{name} = {stop!r}: give a text, or a list of texts such as ['</search>']")
    for one in texts:
        if not one:
            raise ValueError(f"{name} = {texts!r}: an empty text would end every answer at its beginning")
        if "\ufffd" in one or any("\ud800" <= character <= "\udfff" for character in one):
            raise ValueError(
                f"{name} = {texts!r}: U+FFFD and halves of surrogate pairs stand for bytes that are no text, "
                "where no answer can be told to end"
            )
    return tuple(dict.fromkeys(texts))


def _stops(value: Any) -> list[str] | None:
    return None if value is None else list(checked_stop(value))


Stops = Annotated[list[str] | None, BeforeValidator(_stops)]
"""Texts at which an answer ends: one, or several."""


CHUNK_TOKENS = 512
"""Of a request to servers on CPUs."""


class SamplingConfig(BaseConfig):
    """How answers are sampled."""

    unlisted = frozenset({"top_p"})
    temperature: float = Field(default=1.0, ge=0.01, le=2, allow_inf_nan=False)
    """Softmax temperature, 0.01 to 2; the loss takes it into account."""
    top_p: float = 1.0
    """Must be 1.0: a policy gradient needs samples from the whole distribution; lower the temperature."""
    max_tokens: int = Field(default=256, ge=1)
    """Maximum tokens of an answer."""
    stop: list[str] = []
    """Texts at which an answer ends, such as </search>; the tokens that write them are learned as sampled."""
    chunk_tokens: int | None = Field(default=None, ge=1)
    """Tokens per request; a crash loses an answer's last, unfinished piece (default: 512, on GPUs 8192)."""

    @property
    def chunk(self) -> int:
        """Tokens per request; those of servers on CPUs as long as it is left open."""
        return self.chunk_tokens or CHUNK_TOKENS

    @field_validator("stop", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> list[str]:
        return list(checked_stop(value))

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


# Settings of problems that rest, because they are too easy or too hard at the moment.


class PoolsConfig(BaseConfig):
    """Problems whose answers were all good, or all bad, are not asked for a while."""

    easy: float | None = Field(default=None, allow_inf_nan=False)
    """Mean reward from which on a problem is too easy and rests, such as 1.0 (default: none is)."""
    hard: float | None = Field(default=None, allow_inf_nan=False)
    """Mean reward up to which a problem is too hard and rests, such as 0.0 (default: none is)."""
    rest: int = Field(default=1, ge=1)
    """Epochs of its environment in which such a problem is not asked, before it is asked again."""
    window: int = Field(default=1, ge=1)
    """How often a problem must have been asked; the mean is that of as many times, the last ones."""

    @property
    def remembered(self) -> int:
        """How many of a problem's outcomes decide whether it rests; 0 if none ever does."""
        return 0 if self.easy is None and self.hard is None else self.window

    @model_validator(mode="after")
    def _hard_below_easy(self) -> Self:
        if self.easy is not None and self.hard is not None and self.hard >= self.easy:
            raise ValueError(
                f"pools.hard = {self.hard:g} is not below pools.easy = {self.easy:g}, so that every problem "
                "would rest: problems with a mean reward between the two are those that are asked"
            )
        return self


# Settings of answers that are too long.


class OverlongConfig(BaseConfig):
    """What becomes of answers that are cut off, or nearly."""

    type: Literal["learn", "mask", "shape"] = "learn"
    """learn: as all others; mask: nothing is learned from those cut off; shape: length lowers the reward."""
    buffer: int = Field(default=256, ge=1)
    """shape: tokens before sampling.max_tokens over which the punishment grows from 0."""
    penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """shape: what an answer that is cut off loses of its reward."""


# Settings of advantages.


GAE = "gae"
"""The type with which the orchestrator ships rewards, and the trainer's critic says what they are worth."""


COMPARING = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "maxrl", "gdpo"})
"""The types that compare the answers to one prompt, of which there must be two."""
NOT_SHAPED = {
    "maxrl": "it divides by the mean reward, which a punishment may make negative",
    "gdpo": "it compares the named parts of rewards, which a punishment does not reach",
}
"""The types that can't be used with overlong.type = 'shape', and why."""


class AdvantageConfig(BaseConfig):
    """How the answers to a prompt are compared with each other."""

    arguments_of: ClassVar[dict[str, str]] = {"type": "args"}
    """The arguments of one type do not apply to another."""
    type: str = "grpo"
    """grpo, rloo, ... (docs/reference/algorithms.md); gae, of a critic (trainer.critic); or module:Class."""
    args: dict[str, Any] = {}
    """Arguments; grpo: normalize, divide by the standard deviation (true); gdpo: weights of named rewards."""


LABEL = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
"""What a name in metrics may be."""


class EnvironmentConfig(BaseConfig):
    """Where prompts and rewards come from."""

    arguments_of: ClassVar[dict[str, str]] = {"name": "args"}
    """Another name means another environment, to which the arguments given for the first do not apply."""
    name: str = "reverse_text"
    """A built-in one, such as reverse_text, dataset, openenv or agent (see the docs), or module:Class."""
    args: dict[str, Any] = {}
    """Arguments of the environment's constructor, such as its number of problems."""
    label: str | None = Field(default=None, pattern=LABEL)
    """What messages, metrics and rollouts call it: letters, digits and _.- only (default: its name)."""

    @property
    def called(self) -> str:
        """What messages, metrics and rollouts call it."""
        return self.label or self.name


class EnvironmentSamplingConfig(BaseConfig):
    """How the answers in one of several environments are sampled."""

    unlisted = frozenset({"temperature"})
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of an answer (default: that of the run)."""
    stop: Stops = None
    """Texts at which an answer ends (default: those of the run)."""
    temperature: None = None
    """Must be left out: a batch has one temperature, sampling.temperature of the run."""

    @field_validator("temperature", mode="before")
    @classmethod
    def _one_for_all(cls, value: object) -> None:
        if value is not None:
            raise ValueError(
                "all environments of a run are sampled at one temperature, because the loss divides the "
                "logits of a whole batch by it: set sampling.temperature of the run"
            )


class MixedEnvironmentConfig(EnvironmentConfig):
    """One of several environments, and what is particular about its prompts."""

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the prompts, in relation to the weights of the other environments."""
    samples_per_prompt: int | None = Field(default=None, ge=1)
    """Answers to each of its prompts (default: that of the run)."""
    sampling: EnvironmentSamplingConfig = EnvironmentSamplingConfig()
    advantage: AdvantageConfig | None = None
    """How the answers to its prompts are compared (default: that of the run)."""
    overlong: OverlongConfig | None = None
    """What becomes of its answers that are too long (default: that of the run)."""
    pools: PoolsConfig | None = None
    """Which of its problems rest (default: as the run's settings say)."""


# Settings of evaluations, which are never trained on.


class EvalSamplingConfig(BaseConfig):
    """How the answers of an evaluation are sampled."""

    temperature: float = Field(default=1.0, ge=0, le=2, allow_inf_nan=False)
    """Softmax temperature, 0 to 2; 0 always takes the likeliest token."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of an answer (default: as in training)."""
    stop: Stops = None
    """Texts at which an answer ends (default: as in training)."""


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
