"""Makes the configured environment, and checks it before a run starts."""

from collections.abc import Callable

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.orchestrator.environments.protocol import BadEnvironment, Environment, EnvironmentFailed
from cairn.orchestrator.environments.reverse_text import ReverseText
from cairn.orchestrator.environments.single_turn import SingleTurn, wrong_with
from cairn.run.extensions import BadExtension, load, make
from cairn.run.waiting import run_async

BUILT_IN: dict[str, Callable[..., Environment]] = {"reverse_text": ReverseText}


def make_environment(config: EnvironmentConfig) -> Environment:
    """The built-in environment of that name, or `module:Class`, made with the configured arguments.

    Raises:
        BadEnvironment: it does not exist, its constructor fails, or it is not an `Environment`.
    """
    try:
        cls = load(config.name, BUILT_IN, "orchestrator.environment.name")
        environment = make(cls, config.args, "orchestrator.environment.args")
    except BadExtension as error:
        raise BadEnvironment(str(error)) from error
    if wrong := wrong_with(environment):
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

    async def ask() -> None:
        with SingleTurn(environment, config) as asked:
            await asked.messages(0)

    try:
        run_async(ask())
    except EnvironmentFailed as error:
        raise BadEnvironment(f"orchestrator.environment: {error}") from None
    return environment
