"""How answers are sampled, and what may end them."""

from typing import Any, cast

from pydantic import Field, field_validator

from cairn.config.base import BaseConfig


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
    chunk_tokens: int = Field(default=512, ge=1)
    """Tokens per request: after a crash, an answer continues from its last complete piece of this size."""

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
