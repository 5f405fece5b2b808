# Unchecked values have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Settings of the losses of SFT and RL; each type of loss has its own."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from cairn.config.settings import BaseConfig
from cairn.run.extensions import unknown

Section = TypeVar("Section", bound=BaseConfig)


class LossConfig(BaseConfig):
    """The settings that all types of losses have."""

    is_own: ClassVar[bool] = False
    """Whether it is the user's own class."""
    type: Any
    """Which loss: a built-in name, or module:Class."""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the loss's class: the settings of its type."""
        return self.model_dump(exclude={"type"})


class PolicyConfig(LossConfig):
    """The settings that all built-in losses of RL have."""

    type: Any
    """How answers are learned from: ppo_clip, cispo, ... (docs/reference/algorithms.md), or module:Class."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over tokens, over the means of answers, or with a constant in the place of answers' lengths."""
    aggregation_tokens: int | None = Field(default=None, ge=1)
    """constant: what the sum of each answer is divided by, such as sampling.max_tokens (Dr. GRPO)."""
    entropy_coef: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Weight of the entropy bonus; 0 only reports the entropy (default: it is not computed)."""
    importance: Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "off"
    """off: ratios are to the sampler; else to the weights at a batch's start, weighted for the rest."""
    importance_min: float = Field(default=0.0, ge=0, le=1)
    """importance: the least ratio to the sampler; a smaller one is set to it, or masked."""
    importance_max: float = Field(default=3.0, ge=1, allow_inf_nan=False)
    """importance: the largest ratio to the sampler; a larger one is set to it, or masked."""
    geometric_min: float | None = Field(default=None, gt=0, le=1)
    """Leave out answers whose geometric mean of ratios to the sampler is smaller (default: none)."""
    geometric_max: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """Leave out answers whose geometric mean of ratios to the sampler is larger (default: none)."""

    @model_validator(mode="after")
    def _settings_that_go_together(self) -> Self:
        if self.aggregation == "constant" and self.aggregation_tokens is None:
            raise ValueError(
                "aggregation = 'constant' needs aggregation_tokens, the number that each answer's sum is "
                "divided by: give sampling.max_tokens"
            )
        if self.aggregation != "constant" and self.aggregation_tokens is not None:
            raise ValueError(
                f"aggregation_tokens = {self.aggregation_tokens} is for aggregation = 'constant', and "
                f"aggregation is {self.aggregation!r}: set that, or leave aggregation_tokens out"
            )
        bounds = self.model_fields_set & {"importance_min", "importance_max"}
        if self.importance == "off" and any(getattr(self, name) != self._default(name) for name in bounds):
            raise ValueError(
                f"{min(bounds)} bounds the weights of importance, which is off: choose one of "
                "token_truncate, token_mask, sequence_truncate, sequence_mask"
            )
        return self

    def _default(self, name: str) -> Any:
        return type(self).model_fields[name].default


class ClippedConfig(PolicyConfig):
    """A clipped ratio."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """ppo_clip: the lower bound of the ratio is 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """ppo_clip: the upper bound of the ratio is 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """ppo_clip, gspo: the ratio's bound for negative advantages, such as 3 (default: none)."""

    @model_validator(mode="after")
    def _dual_clip_is_the_outer_bound(self) -> Self:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip = {self.dual_clip:g} must be above 1 + clip_high = {1 + self.clip_high:g}: it "
                "bounds ratios that clip_high leaves alone, those of tokens with a negative advantage"
            )
        return self


class PPOClipConfig(ClippedConfig):
    """Policy gradient with a ratio per token: its probability now over its probability when sampled."""

    type: Literal["ppo_clip"] = "ppo_clip"


class CispoConfig(PolicyConfig):
    """Truncated importance sampling of tokens."""

    type: Literal["cispo"] = "cispo"
    ratio_max: float = Field(default=2.0, ge=1)
    """cispo: larger ratios are reduced to this."""


class IcePopConfig(PolicyConfig):
    """Importance sampling that excludes tokens whose ratio is out of bounds."""

    type: Literal["icepop"] = "icepop"
    ratio_min: float = Field(default=0.5, ge=0, le=1)
    """icepop: tokens with a smaller ratio are excluded."""
    ratio_max: float = Field(default=2.0, ge=1)
    """icepop: tokens with a larger ratio are excluded."""


class GspoConfig(ClippedConfig):
    """PPO's objective with one ratio for each answer."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, lt=1)
    """gspo: the same for an answer's ratio (0.0003)."""
    clip_high: float = Field(default=4e-4, ge=0)
    """gspo: the same for an answer's ratio (0.0004)."""
    aggregation: Literal["token", "sequence", "constant"] = "sequence"


class DppoConfig(PolicyConfig):
    """Importance sampling that excludes tokens whose probability has moved too far."""

    type: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """dppo: how far a token's probability has moved: the difference (tv), or the KL divergence (kl)."""
    delta_low: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    """dppo: tokens to learn from less whose probability has fallen by more are excluded."""
    delta_high: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    """dppo: tokens to learn from more whose probability has risen by more are excluded."""


class SapoConfig(PolicyConfig):
    """A soft gate in the place of clipping."""

    type: Literal["sapo"] = "sapo"
    tau_pos: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """sapo: how narrow the gate is for positive advantages."""
    tau_neg: float = Field(default=1.05, gt=0, allow_inf_nan=False)
    """sapo: how narrow the gate is for other advantages."""
    aggregation: Literal["token", "sequence", "constant"] = "sequence"


class GpgConfig(PolicyConfig):
    """Plain policy gradient; its weights bound the ratio of the current policy to the sampler."""

    type: Literal["gpg"] = "gpg"
    importance: Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "token_truncate"
    )

    @field_validator("importance")
    @classmethod
    def _weights_old_tokens(cls, value: str) -> str:
        if value == "off":
            raise ValueError(
                "gpg has no ratio of its own, so without weights it would learn wrongly from tokens of older "
                "policies; with token_truncate the weights are 1 for tokens of the current one"
            )
        return value


class LikelihoodConfig(LossConfig):
    """Negative log-likelihood of the tokens to learn."""

    type: Literal["likelihood"] = "likelihood"
    """What to minimise: likelihood (-log p of each token to learn), or your own loss (module:Class)."""


class CustomLossConfig(LossConfig):
    """A user's own loss for RL."""

    is_own = True
    type: str
    """How answers are learned from: ppo_clip, cispo, ... (docs/reference/algorithms.md), or module:Class."""
    args: dict[str, Any] = {}
    """module:Class: arguments of its constructor."""

    @field_validator("type")
    @classmethod
    def _is_a_class(cls, value: str) -> str:
        if wrong := unknown(value, cls.built_in(), "cairn.losses"):
            raise ValueError(f"{value!r} is {wrong}")
        return value

    @classmethod
    def built_in(cls) -> Iterable[str]:
        """The built-in types."""
        return POLICY_LOSSES

    def arguments(self) -> dict[str, Any]:
        return self.args


class CustomSFTLossConfig(CustomLossConfig):
    """A loss of your own, for SFT."""

    type: str
    """What to minimise: likelihood (-log p of each token to learn), or your own loss (module:Class)."""

    @classmethod
    def built_in(cls) -> Iterable[str]:
        return SFT_LOSSES


def by_type(*classes: type[Section]) -> dict[str, type[Section]]:
    """The members of a union of sections by their `type`."""
    return {cls.model_fields["type"].default: cls for cls in classes}


POLICY_LOSSES = by_type(
    PPOClipConfig, CispoConfig, IcePopConfig, GspoConfig, DppoConfig, SapoConfig, GpgConfig
)
"""The losses of RL by type; the first is the default."""
SFT_LOSSES = by_type(LikelihoodConfig)
"""Those of SFT, likewise."""


def tag_by_type(built_in: Mapping[str, type[BaseConfig]]) -> Callable[[Any], str]:
    """Tells which member of a union a section is for."""

    def tag(data: Any) -> str:
        first = next(iter(built_in))
        if isinstance(data, dict):
            kind = cast("dict[str, Any]", data).get("type", first)
        else:  # a section that is made, or a single value, which the first member refuses
            kind = getattr(data, "type", first)
        return kind if isinstance(kind, str) and kind in built_in else "module:Class"

    return tag


PolicyLossConfig = Annotated[
    Annotated[PPOClipConfig, Tag("ppo_clip")]
    | Annotated[CispoConfig, Tag("cispo")]
    | Annotated[IcePopConfig, Tag("icepop")]
    | Annotated[GspoConfig, Tag("gspo")]
    | Annotated[DppoConfig, Tag("dppo")]
    | Annotated[SapoConfig, Tag("sapo")]
    | Annotated[GpgConfig, Tag("gpg")]
    | Annotated[CustomLossConfig, Tag("module:Class")],
    Discriminator(tag_by_type(POLICY_LOSSES)),
]
"""The settings of one type of RL loss; `type` says which."""
SFTLossConfig = Annotated[
    Annotated[LikelihoodConfig, Tag("likelihood")] | Annotated[CustomSFTLossConfig, Tag("module:Class")],
    Discriminator(tag_by_type(SFT_LOSSES)),
]
"""The settings of one type of SFT loss; `type` says which."""
