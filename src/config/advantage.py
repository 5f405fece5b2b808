"""Settings of advantages."""

from typing import Any, ClassVar

from cairn.config.base import BaseConfig

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
    """grpo, rloo, ... (docs/algorithms.md); gae, of a critic (trainer.critic); or your own: module:Class."""
    args: dict[str, Any] = {}
    """Arguments; grpo: normalize, divide by the standard deviation (true); gdpo: weights of named rewards."""
