"""Settings of the optimisers, of the learning rate's schedule, and of the guard against spikes."""

import math
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from cairn.config.loss import by_type, tag_by_type
from cairn.config.settings import BaseConfig
from cairn.run.extensions import unknown

EIGHT_BIT = {"adamw8bit", "adam_8bit", "adam8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"}
"""What other programs call AdamW with 8-bit moments."""


class StateSize(NamedTuple):
    """What an optimiser keeps of a model.

    what: for people. counted: whether `bytes` follows from shapes, or is a guess.
    """

    what: str
    bytes: int
    counted: bool = True


class BaseOptimizerConfig(BaseConfig):
    """The settings that all types of optimisers have."""

    is_own: ClassVar[bool] = False
    """Whether it is the user's own class."""
    type: Any
    """Which optimiser: a built-in name, or module:Class."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay (sgd: L2, added to the gradient); applies to matrices only."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum global L2 norm of the gradients; larger ones are scaled down."""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the optimiser's class: the settings of its type."""
        return self.model_dump(exclude={"type", "lr", "weight_decay", "max_grad_norm"})

    def state(self, hidden: int, others: int) -> StateSize:
        """What it keeps for so many elements in decoder layers, and so many elsewhere."""
        raise NotImplementedError


DecayRate = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(BaseOptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019)."""

    type: Literal["adamw"] = "adamw"
    """Which optimiser: adamw, adamw_8bit, muon, sgd, lion, or your own (module:Class)."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """adamw: decay rates of the first and second moments."""
    eps: float = Field(default=1e-8, gt=0)
    """adamw: term added to the denominator for numerical stability."""

    def state(self, hidden: int, others: int) -> StateSize:
        return StateSize("AdamW's two moments, float32", 8 * (hidden + others))


class AdamW8bitConfig(AdamWConfig):
    """AdamW with moments in eight bits (Dettmers et al. 2022)."""

    type: Literal["adamw_8bit"] = "adamw_8bit"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which optimiser: adamw, adamw_8bit, muon, sgd, lion, or your own (module:Class)."""

    def state(self, hidden: int, others: int) -> StateSize:
        """Two moments, a byte each, and a scale for every 256 of them; small weights are too few to count."""
        elements = hidden + others
        return StateSize("AdamW's two moments, 8-bit", 2 * elements + 8 * elements // 256)


class MuonConfig(BaseOptimizerConfig):
    """Muon (Jordan 2024) for the matrices of decoder layers, with AdamW for all other weights."""

    type: Literal["muon"] = "muon"
    """Which optimiser: adamw, adamw_8bit, muon, sgd, lion, or your own (module:Class)."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """muon: decay rate of the mean of gradients of matrices."""
    nesterov: bool = True
    """muon: Nesterov's momentum."""
    ns_steps: int = Field(default=5, ge=1, lt=100)
    """muon: Newton-Schulz iterations, which make an update orthogonal."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """muon: AdamW's decay rates, for embeddings, head and vectors."""
    eps: float = Field(default=1e-8, gt=0)
    """muon: AdamW's term for numerical stability."""

    def state(self, hidden: int, others: int) -> StateSize:
        """One moment of what lies in layers, two of the rest; the layers' vectors are too few to count."""
        return StateSize("Muon's momentum and AdamW's moments, float32", 4 * hidden + 8 * others)


class SGDConfig(BaseOptimizerConfig):
    """Stochastic gradient descent."""

    type: Literal["sgd"] = "sgd"
    """Which optimiser: adamw, adamw_8bit, muon, sgd, lion, or your own (module:Class)."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """sgd: decay rate of the sum of gradients; 0: none is kept."""
    nesterov: bool = False
    """sgd: Nesterov's momentum."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> "SGDConfig":
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov = true needs a momentum above 0")
        return self

    def state(self, hidden: int, others: int) -> StateSize:
        return StateSize("SGD's momentum, float32", 4 * (hidden + others) if self.momentum else 0)


class LionConfig(BaseOptimizerConfig):
    """Lion (Chen et al. 2023): the sign of a mean of gradients."""

    type: Literal["lion"] = "lion"
    """Which optimiser: adamw, adamw_8bit, muon, sgd, lion, or your own (module:Class)."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.99)
    """lion: share of the mean in the update, and its decay rate."""

    def state(self, hidden: int, others: int) -> StateSize:
        return StateSize("Lion's momentum, float32", 4 * (hidden + others))


class CustomOptimizerConfig(BaseOptimizerConfig):
    """A user's own optimiser."""

    is_own = True
    type: str
    """Which optimiser: adamw, adamw_8bit, muon, sgd, lion, or your own (module:Class)."""
    args: dict[str, Any] = {}
    """module:Class: arguments of its constructor, beside parameters and lr."""

    @field_validator("type")
    @classmethod
    def _is_a_class(cls, value: str) -> str:
        if value in EIGHT_BIT:
            raise ValueError(
                f"{value!r} is called adamw_8bit here; its state is not that of torchao or bitsandbytes, and "
                "is read by any number of ranks"
            )
        if wrong := unknown(value, OPTIMIZERS, "cairn.optimizers"):
            raise ValueError(f"{value!r} is {wrong}")
        return value

    def arguments(self) -> dict[str, Any]:
        return self.args

    def state(self, hidden: int, others: int) -> StateSize:
        """Unknown; as much as AdamW's."""
        return StateSize("the optimiser's state, if it is as large as AdamW's", 8 * (hidden + others), False)


OPTIMIZERS = by_type(AdamWConfig, AdamW8bitConfig, MuonConfig, SGDConfig, LionConfig)
"""By type; the first is the default."""


OptimizerConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")]
    | Annotated[AdamW8bitConfig, Tag("adamw_8bit")]
    | Annotated[MuonConfig, Tag("muon")]
    | Annotated[SGDConfig, Tag("sgd")]
    | Annotated[LionConfig, Tag("lion")]
    | Annotated[CustomOptimizerConfig, Tag("module:Class")],
    Discriminator(tag_by_type(OPTIMIZERS)),
]
"""The settings of one type of optimiser; `type` says which."""


# Settings of the learning rate's schedule.


class SchedulerConfig(BaseConfig):
    """Learning rate schedule: linear warm-up, then the chosen shape."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up to the peak learning rate."""
    steps: int | None = Field(default=None, ge=1)
    """Step at which linear and cosine reach their end (default: max_steps)."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of linear and cosine, as a fraction of the peak."""

    def rate(self, step: int, peak: float, end: int) -> float:
        """The rate of optimiser step `step`, counted from 1; `end` is where linear and cosine arrive.

        It depends on nothing else, so a resumed run needs only its step.
        """
        if step <= self.warmup_steps:
            return peak * step / self.warmup_steps
        if self.type == "constant":
            return peak
        done = min((step - self.warmup_steps) / max(end - self.warmup_steps, 1), 1.0)
        fall = (1 + math.cos(math.pi * done)) / 2 if self.type == "cosine" else 1 - done
        return peak * (self.min_lr_ratio + (1 - self.min_lr_ratio) * fall)

    def end_in_words(self, max_steps: int, section: str) -> str | None:
        """What the user should know of the end of the schedule; None if it has none, or a later one."""
        end = self.steps or max_steps
        if self.type == "constant":
            return None
        falls = (
            f"{section}.type = {self.type}: the learning rate falls to {self.min_lr_ratio:g} of its peak at "
            f"step {end}"
        )
        if end < max_steps:
            still = "and learn nothing" if self.min_lr_ratio == 0 else "with this rate"
            return f"{falls}, and steps {end + 1} to {max_steps} go on {still}; raise {section}.steps"
        if end == max_steps:
            return f"{falls}, the last one ({section}.steps is another end, for a run that may go on)"
        return None  # somebody has chosen that

    def problem(self, max_steps: int, section: str) -> str | None:
        """Why no schedule of so many steps can be like this; None if one can."""
        end = self.steps or max_steps
        if self.type == "constant" or self.warmup_steps < end:
            return None
        return (
            f"{section}.warmup_steps = {self.warmup_steps} leaves no step for the {self.type} schedule, "
            f"which ends at step {end}; lower it or raise {section}.steps"
        )


# Settings of the guard against spikes of the gradient.


class SpikeConfig(BaseConfig):
    """A guard against single updates that would harm the model."""

    on_spike: Literal["off", "skip", "rewind"] = "off"
    """Gradients that spike or are not finite: skip them, or rewind a checkpoint; off: the latter end it."""
    grad_norm: float = Field(default=5.0, gt=1, allow_inf_nan=False)
    """A spike is a gradient norm above so many times its running mean."""
    loss: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """SFT: or a loss above so many times its running mean (default: the loss is not looked at)."""
    decay: float = Field(default=0.95, ge=0, lt=1)
    """Weight of what was before in the running means; updates that were skipped are not in them."""
    warmup: int = Field(default=20, ge=1)
    """Updates that make up the means before any is skipped."""
    max_in_a_row: int = Field(default=5, ge=1)
    """The run ends when more updates in a row would be skipped, or more rewinds in a row go to one step."""
