"""Where prompts and rewards come from."""

from cairn.orchestrator.environments.making import BUILT_IN, check_environment, make_environment
from cairn.orchestrator.environments.protocol import BadEnvironment, Environment, EnvironmentFailed
from cairn.orchestrator.environments.reverse_text import ReverseText, longest_common_subsequence
from cairn.orchestrator.environments.single_turn import SingleTurn

__all__ = [
    "BUILT_IN",
    "BadEnvironment",
    "Environment",
    "EnvironmentFailed",
    "ReverseText",
    "SingleTurn",
    "check_environment",
    "longest_common_subsequence",
    "make_environment",
]
