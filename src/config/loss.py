# Unchecked values have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Settings of the losses of SFT and RL; each type of loss has its own."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag, field_validator

from cairn.config.base import BaseConfig
from cairn.config.hints import one_of

EARLIER_NAME = "correction"
"""The earlier name of `type`, when all types had the same settings."""
NAMES = AliasChoices("type", EARLIER_NAME)


class LossConfig(BaseConfig):
    """The settings that all types of losses have."""

    is_own: ClassVar[bool] = False
    """Whether it is the user's own class."""
    type: Any
    """Which loss: a built-in name, or module:Class."""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the loss's class: the settings of its type."""
        return self.model_dump(exclude={"type"})


class ClipConfig(LossConfig):
    """Policy gradient with a ratio per token: its probability now over its probability when sampled."""

    type: Literal["clip"] = Field(default="clip", validation_alias=NAMES)
    """How to bound the ratio: clip (PPO), truncate, mask, or your own loss (module:Class)."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """clip: the lower bound of the ratio is 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """clip: the upper bound of the ratio is 1 + clip_high."""


class TruncateConfig(LossConfig):
    """Truncated importance sampling."""

    type: Literal["truncate"] = Field(default="truncate", validation_alias=NAMES)
    """How to bound the ratio: clip (PPO), truncate, mask, or your own loss (module:Class)."""
    ratio_max: float = Field(default=2.0, ge=1)
    """truncate: larger ratios are reduced to this."""


class MaskConfig(LossConfig):
    """Importance sampling that excludes tokens whose ratio is out of bounds."""

    type: Literal["mask"] = Field(default="mask", validation_alias=NAMES)
    """How to bound the ratio: clip (PPO), truncate, mask, or your own loss (module:Class)."""
    ratio_min: float = Field(default=0.5, ge=0, le=1)
    """mask: tokens with a smaller ratio are excluded."""
    ratio_max: float = Field(default=2.0, ge=1)
    """mask: tokens with a larger ratio are excluded."""


class LikelihoodConfig(LossConfig):
    """Negative log-likelihood of the tokens to learn."""

    type: Literal["likelihood"] = "likelihood"
    """What to minimise: likelihood (-log p of each token to learn), or your own loss (module:Class)."""


class CustomLossConfig(LossConfig):
    """A user's own loss for RL."""

    is_own = True
    type: str = Field(validation_alias=NAMES)
    """How to bound the ratio: clip (PPO), truncate, mask, or your own loss (module:Class)."""
    args: dict[str, Any] = {}
    """module:Class: arguments of its constructor."""

    @field_validator("type")
    @classmethod
    def _is_a_class(cls, value: str) -> str:
        if not all(value.partition(":")):
            names = list(cls.built_in())
            raise ValueError(
                f"{value!r} is not one of {', '.join(names)}, nor module:Class{one_of(value, names)}"
            )
        return value

    @classmethod
    def built_in(cls) -> Iterable[str]:
        """The built-in types."""
        return POLICY_LOSSES

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the class."""
        return self.args


class CustomSFTLossConfig(CustomLossConfig):
    """A loss of your own, for SFT."""

    type: str
    """What to minimise: likelihood (-log p of each token to learn), or your own loss (module:Class)."""

    @classmethod
    def built_in(cls) -> Iterable[str]:
        """The built-in types."""
        return SFT_LOSSES


POLICY_LOSSES: dict[str, type[LossConfig]] = {
    "clip": ClipConfig,
    "truncate": TruncateConfig,
    "mask": MaskConfig,
}
"""The losses of RL by type; the first is the default."""
SFT_LOSSES: dict[str, type[LossConfig]] = {"likelihood": LikelihoodConfig}
"""Those of SFT, likewise."""


def _with_type(data: Any) -> Any:
    """Converts older files, in which `type` had another name and all types had the same settings."""
    if not isinstance(data, dict):
        return data
    data = dict(cast("dict[str, Any]", data))
    if EARLIER_NAME in data:
        data["type"] = data.pop(EARLIER_NAME)
    everything = {name for config in POLICY_LOSSES.values() for name in config.model_fields}
    kind = data.get("type", "clip")
    if data.keys() | {"type"} == everything and kind in POLICY_LOSSES:
        data = {name: value for name, value in data.items() if name in POLICY_LOSSES[kind].model_fields}
    return data


def _tag(built_in: dict[str, type[LossConfig]]) -> Callable[[Any], str]:
    """Tells which member of a union a section is for."""

    def tag(data: Any) -> str:
        kind = (
            cast("dict[str, Any]", data).get("type", next(iter(built_in)))
            if isinstance(data, dict)
            else data.type
        )
        return kind if isinstance(kind, str) and kind in built_in else "module:Class"

    return tag


PolicyLossConfig = Annotated[
    Annotated[ClipConfig, Tag("clip")]
    | Annotated[TruncateConfig, Tag("truncate")]
    | Annotated[MaskConfig, Tag("mask")]
    | Annotated[CustomLossConfig, Tag("module:Class")],
    Discriminator(_tag(POLICY_LOSSES)),
    BeforeValidator(_with_type),
]
"""The settings of one type of RL loss; `type` says which."""
SFTLossConfig = Annotated[
    Annotated[LikelihoodConfig, Tag("likelihood")] | Annotated[CustomSFTLossConfig, Tag("module:Class")],
    Discriminator(_tag(SFT_LOSSES)),
]
"""The settings of one type of SFT loss; `type` says which."""
