"""What identifies an environment, so that a resumed run notices when its problems have changed."""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cairn.checkpoint.step import OrchestratorRecord, StepFolder
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments import Environment, SingleTurn
from cairn.run.recipe import ORCHESTRATOR, Change, changed_settings, code_in, settings_of
from cairn.run.seeds import derive
from cairn.run.waiting import run_async

PROBLEMS = 4096
"""Maximum number of problems whose messages are read; of a larger environment, a seeded sample."""
SECONDS = 1.0
"""Maximum time for reading messages. Digests are kept at every power of two, so that two environments are
compared on as many problems as both have read, independent of the speed of the machine."""


async def environment_of(environment: SingleTurn) -> dict[str, Any]:
    """The identity of an environment, for the recipe.

    Returns:
        `problems`: their number. `messages`: digests of the messages of the first 1, 2, 4, ... problems read,
        by that count. `own`: the environment's own `identity` (text, such as a version), if it has one.

    Raises:
        EnvironmentFailed: a problem has no conversation.
    """
    count = environment.problems
    digest, digests = hashlib.blake2b(digest_size=16), {}
    end = time.monotonic() + SECONDS
    for i in range(min(count, PROBLEMS)):
        problem = i if count <= PROBLEMS else derive(0, "environment identity", i) % count
        messages = await environment.messages(problem)
        digest.update(json.dumps(messages, sort_keys=True, default=str).encode())
        if (i + 1) & i == 0 or i + 1 == count:
            digests[str(i + 1)] = digest.hexdigest()
        if time.monotonic() > end:
            break
    own = {} if environment.identity is None else {"own": environment.identity}
    return {"problems": count, "messages": digests, **own}


def same_environment(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two identities agree in everything that both contain."""
    if one["problems"] != other["problems"]:
        return False
    if "messages" in one and "messages" in other and one.get("own") != other.get("own"):
        return False
    seen = one.get("messages", {}).keys() & other.get("messages", {}).keys()
    most = max(seen, key=int, default=None)
    return most is None or one["messages"][most] == other["messages"][most]


def orchestrator_recipe(config: OrchestratorConfig, environment: Environment) -> dict[str, Any]:
    """The orchestrator's part of a run's recipe.

    Raises:
        EnvironmentFailed: a problem has no conversation.
    """

    async def identify() -> dict[str, Any]:
        with SingleTurn(environment, config) as asked:
            return await environment_of(asked)

    settings = settings_of(config.model_dump(), ORCHESTRATOR)
    settings |= code_in(settings)
    return {"settings": settings, "environment": run_async(identify())}


def changes_since(checkpoint: Path, recipe: Mapping[str, Any]) -> list[Change]:
    """How the orchestrator's recipe differs from that of a checkpoint.

    Checkpoints of older versions contain only the environment's settings and its number of problems.
    """
    state = StepFolder(checkpoint).orchestrator_state() or OrchestratorRecord()
    prompts = state.prompts
    saved = state.recipe or {
        "settings": settings_of({"environment": prompts.get("environment", {})}, ORCHESTRATOR),
        **({"environment": {"problems": prompts["problems"]}} if "problems" in prompts else {}),
    }
    settings = _under_new_names(saved["settings"])
    changes = changed_settings(settings, recipe["settings"], ORCHESTRATOR)
    was, now = saved.get("environment"), recipe["environment"]
    if was and not same_environment(was, now):
        changes.append(Change("environment", was, now, "environment"))
    return changes


def _under_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under their current names: `normalize_advantages` was renamed."""
    renamed = dict(settings)
    if "normalize_advantages" in renamed:
        args = {} if renamed.pop("normalize_advantages") else {"normalize": False}
        renamed |= {"advantage.type": "grpo", "advantage.args": args}
    return renamed
