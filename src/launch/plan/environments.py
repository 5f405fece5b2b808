"""What the environments of a run ask: they are made and checked, and some of their problems are shown.

That happens in the launcher, since environments are the user's code. What template and tokenizer make of the
problems is found out by `preflight`, which gets them as facts.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.advantages import make_advantage
from cairn.orchestrator.completion.answers import check_parsers
from cairn.orchestrator.environment_identity import orchestrator_recipe
from cairn.orchestrator.environments import (
    AskedEnvironment,
    BadEnvironment,
    Environment,
    EnvironmentFailed,
    SingleTurn,
    ask,
    check_environment,
    check_environments,
)
from cairn.run.errors import UsageError
from cairn.run.seeds import derive
from cairn.run.waiting import run_async

PROBLEMS = 64
"""Problems of an environment that are looked at, at most: the first, and others drawn by the run's seed."""
SECONDS = 1.0
"""Time for that."""


@dataclass(frozen=True)
class Checked:
    """What is known of a run's environments once they are checked.

    recipe: the orchestrator's part of the run's recipe. asked: facts for `preflight`, a table for each
    environment.
    """

    recipe: dict[str, Any]
    asked: list[dict[str, Any]]


def check_orchestrator(config: OrchestratorConfig) -> Checked:
    """Check that environments, evaluations, advantages and parsers work, before anything is started.

    Raises:
        UsageError: one does not.
    """
    for one in config.of_environments():
        make_advantage(one.advantage)
    check_parsers(config)
    evaluated: dict[str, Environment] = {}
    for evaluation in config.eval:
        try:
            evaluated[evaluation.name] = check_environment(config.of_evaluation(evaluation))
        except (BadEnvironment, EnvironmentFailed) as error:
            raise UsageError(f"evaluation {evaluation.name!r}: {error}") from None
    try:
        environments = check_environments(config)
        recipe = orchestrator_recipe(config, *environments, evaluated=evaluated)
        of_run = zip(config.of_environments(), environments, strict=True)
        asked = [run_async(_asked(one, own, "environment", own.environment.called)) for own, one in of_run]
        for evaluation in config.eval:
            own = config.of_evaluation(evaluation)
            asked.append(run_async(_asked(evaluated[evaluation.name], own, "evaluation", evaluation.name)))
    except (BadEnvironment, EnvironmentFailed) as error:
        raise UsageError(str(error)) from None
    return Checked(recipe, asked)


def facts_of(checked: Checked, context: int | None, *, own_server: bool) -> dict[str, Any]:
    """Facts for `preflight` about prompts.

    Args:
        context: maximum tokens of a prompt and its answer on the servers, as far as it is known.
        own_server: whether the run starts its server, whose context is otherwise the model's.
    """
    setting = "--inference.max-model-len" if own_server else "--max-model-len, where the server is started"
    return {
        "asked": checked.asked,
        "context": context,
        "context_is_the_models": own_server and context is None,
        "smaller_context": setting,
    }


async def _asked(
    environment: Environment, config: OrchestratorConfig, what: str, name: str
) -> dict[str, Any]:
    """Facts about what an environment asks.

    Returns:
        `whose`: of whom, in words. `trained`: whether its answers are. `one_answer`: whether each of its
        rollouts is one prompt and one answer. `max_tokens`: of an answer. `prompts`: of some problems, as far
        as they are known before a rollout begins, with `problem`, `messages` and `tools`.
    """
    prompts: list[dict[str, Any]] = []
    end = time.monotonic() + SECONDS
    with ask(environment, config) as asked:
        for problem in _drawn(asked.problems, config.seed):
            if prompts and time.monotonic() > end:
                break
            if (shown := _as_prompt(asked, await asked.shown(problem))) is None:
                break
            prompts.append({"problem": problem, **shown})
        one_answer = isinstance(asked, SingleTurn)
    return {
        "whose": f"{what} {name!r}",
        "trained": what == "environment",
        "one_answer": one_answer,
        "max_tokens": config.sampling.max_tokens,
        "prompts": json.loads(json.dumps(prompts, default=str)),
    }


def _drawn(problems: int, seed: int) -> Sequence[int]:
    if problems <= PROBLEMS:
        return range(problems)
    drawn = (derive(seed, "problems looked at", i) % problems for i in range(1, PROBLEMS))
    return list(dict.fromkeys([0, *drawn]))


def _as_prompt(asked: AskedEnvironment, shown: Any) -> dict[str, Any] | None:
    """Messages and tools of a problem as the model will be asked first; None if only its rollout knows."""
    if isinstance(asked, SingleTurn):
        return {"messages": shown, "tools": None}
    if isinstance(shown, Mapping):
        found = cast("Mapping[str, Any]", shown)
        if found.get("messages") and "tools" in found:
            return {"messages": found["messages"], "tools": found["tools"]}
    return None
