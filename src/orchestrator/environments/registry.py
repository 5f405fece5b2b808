"""Makes the configured environment, and checks it before a run starts."""

from collections.abc import Callable
from typing import Any

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.orchestrator.environments.agent import Agent, AgentPrograms
from cairn.orchestrator.environments.calculator import Calculator
from cairn.orchestrator.environments.calls import AskedEnvironment
from cairn.orchestrator.environments.data_set import DataSet
from cairn.orchestrator.environments.gymnasium_worlds import GymnasiumWorlds
from cairn.orchestrator.environments.open_env import OpenEnv
from cairn.orchestrator.environments.program import Programs
from cairn.orchestrator.environments.protocol import BadEnvironment, Environment, EnvironmentFailed
from cairn.orchestrator.environments.reasoning_tasks import ReasoningGym
from cairn.orchestrator.environments.reverse_text import ReverseText
from cairn.orchestrator.environments.single_turn import GroupRewarded, SingleTurn
from cairn.orchestrator.environments.subprocess_env import process_environment, verifiers
from cairn.orchestrator.environments.tools import ToolPrograms
from cairn.orchestrator.environments.trl_env_factory import FactoryPrograms
from cairn.orchestrator.environments.worlds import WorldPrograms
from cairn.run.extensions import BadExtension, load, make
from cairn.run.waiting import run_async

BUILT_IN: dict[str, Callable[..., Any]] = {
    "calculator": Calculator,
    "reverse_text": ReverseText,
    "dataset": DataSet,
    "reasoning_gym": ReasoningGym,
    "process": process_environment,
    "verifiers": verifiers,
    "gymnasium": GymnasiumWorlds,
    "agent": Agent,
    "openenv": OpenEnv,
}

KINDS: dict[str, type[AskedEnvironment]] = {
    "rollout": Programs,
    "environment_factory": FactoryPrograms,
    "tools": ToolPrograms,
    "agent_command": AgentPrograms,
    "rewards": GroupRewarded,
    "reward": SingleTurn,
    "step": WorldPrograms,
}
"""How an environment is asked, by the attribute that makes it one of a kind; the first that it has counts."""


def kind_of(environment: object) -> type[AskedEnvironment]:
    """How the environment is asked; one with no attribute of `KINDS` counts as single-turn."""
    return next((kind for name, kind in KINDS.items() if _has(environment, name)), SingleTurn)


def _has(environment: object, name: str) -> bool:
    """Whether it has an attribute of `KINDS`; `rewards` may also be a list, of whatever it likes."""
    found = getattr(environment, name, None)
    return callable(found) if name == "rewards" else found is not None


def ask(environment: Environment, config: OrchestratorConfig) -> AskedEnvironment:
    """The environment as the orchestrator asks it."""
    return kind_of(environment)(environment, config)


def check_environments(config: OrchestratorConfig) -> list[Environment]:
    """Check all environments of a run, as `check_environment` does; returns them.

    Raises:
        BadEnvironment: one is none; the message names it.
    """
    if not config.environments:
        return [check_environment(config)]
    found: list[Environment] = []
    for one in config.of_environments():
        try:
            found.append(check_environment(one))
        except BadEnvironment as error:
            raise BadEnvironment(f"environments, {one.environment.called!r}: {error}") from None
    return found


def make_environment(config: EnvironmentConfig) -> Environment:
    """The built-in environment or plug-in of that name, or `module:Class`, made with its arguments.

    Raises:
        BadEnvironment: it does not exist, its constructor fails, or it is not an `Environment`.
    """
    try:
        cls = load(config.name, BUILT_IN, "orchestrator.environment.name", group="cairn.environments")
        environment = make(cls, config.args, "orchestrator.environment.args")
    except BadExtension as error:
        raise BadEnvironment(str(error)) from error
    wrong = kind_of(environment).wrong_with(environment)
    if wrong and not any(_has(environment, name) for name in KINDS):
        wrong += (
            ". It has none of the methods that make an environment one of a kind: reward (a single turn, or "
            "with tools), rewards (of all answers to a problem), step (a world) or rollout (a program)"
        )
    if wrong:
        raise BadEnvironment(f"orchestrator.environment.name = {config.name!r}: {wrong}")
    return environment


def check_environment(config: OrchestratorConfig) -> Environment:
    """Check the configured environment before any process starts: make it, and ask for problem 0.

    Returns:
        The environment.

    Raises:
        BadEnvironment: it can't be made, lacks a method, or its problem 0 is not a conversation.
    """
    environment = make_environment(config.environment)

    async def look() -> None:
        with ask(environment, config) as asked:
            if lacking := await asked.lacks():
                raise EnvironmentFailed(lacking)
            await asked.shown(0)

    try:
        run_async(look())
    except EnvironmentFailed as error:
        raise BadEnvironment(f"orchestrator.environment: {error}") from None
    return environment
