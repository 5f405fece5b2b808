"""Settings of advantages."""

from typing import Any, ClassVar

from cairn.config.base import BaseConfig

GAE = "gae"
"""The type with which the orchestrator ships rewards, and the trainer's critic says what they are worth."""


class AdvantageConfig(BaseConfig):
    """How the answers to a prompt are compared with each other."""

    arguments_of: ClassVar[dict[str, str]] = {"type": "args"}
    """The arguments of one type do not apply to another."""
    type: str = "grpo"
    """grpo; gae, from the values of a critic (trainer.critic); or your own as module:Class."""
    args: dict[str, Any] = {}
    """Arguments of the advantage; grpo: normalize, whether to divide by the standard deviation (true)."""
