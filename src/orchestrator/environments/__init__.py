"""Where prompts and rewards come from."""

from cairn.endpoint import Reply
from cairn.orchestrator.environments.agent import AgentPrograms
from cairn.orchestrator.environments.calls import AskedEnvironment
from cairn.orchestrator.environments.program import (
    LARGEST_SNAPSHOT,
    Model,
    ProgramEnvironment,
    Programs,
    Snapshot,
    no_tool_parser,
)
from cairn.orchestrator.environments.protocol import (
    COUNTED,
    MALFORMED_CALLS,
    BadEnvironment,
    Environment,
    EnvironmentFailed,
    Rewards,
    Unscored,
)
from cairn.orchestrator.environments.registry import (
    BUILT_IN,
    ask,
    check_environment,
    check_environments,
    make_environment,
)
from cairn.orchestrator.environments.reverse_text import ReverseText, longest_common_subsequence
from cairn.orchestrator.environments.single_turn import GroupEnvironment, GroupRewarded, SingleTurn
from cairn.orchestrator.environments.tools import ToolEnvironment, ToolPrograms
from cairn.orchestrator.environments.worlds import WorldEnvironment, WorldPrograms

__all__ = [
    "BUILT_IN",
    "COUNTED",
    "LARGEST_SNAPSHOT",
    "MALFORMED_CALLS",
    "AgentPrograms",
    "AskedEnvironment",
    "BadEnvironment",
    "Environment",
    "EnvironmentFailed",
    "GroupEnvironment",
    "GroupRewarded",
    "Model",
    "ProgramEnvironment",
    "Programs",
    "Reply",
    "ReverseText",
    "Rewards",
    "SingleTurn",
    "Snapshot",
    "ToolEnvironment",
    "ToolPrograms",
    "Unscored",
    "WorldEnvironment",
    "WorldPrograms",
    "ask",
    "check_environment",
    "check_environments",
    "longest_common_subsequence",
    "make_environment",
    "no_tool_parser",
]
