"""What identifies an environment, so that a resumed run notices when its problems have changed."""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cairn.checkpoint.step import OrchestratorRecord, StepFolder
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments import AskedEnvironment, Environment, ask
from cairn.run.recipe import (
    OF_ENVIRONMENT,
    ORCHESTRATOR,
    Change,
    Settings,
    changed_settings,
    code_in,
    is_setting,
    settings_of,
)
from cairn.run.seeds import derive
from cairn.run.waiting import run_async

PROBLEMS = 4096
"""Maximum number of problems whose messages are read; of a larger environment, a seeded sample."""
SECONDS = 1.0
"""Maximum time for reading messages. Digests are kept at every power of two, so that two environments are
compared on as many problems as both have read, independent of the speed of the machine."""

NOT_COMPARED = {
    "process": ("processes", "at_once", "start_timeout"),
    "verifiers": ("processes", "at_once", "start_timeout"),
    "openenv": ("connect_timeout", "message_timeout", "wait"),
    "agent": ("inherit",),
}
"""By built-in environment, arguments that say how fast or with what patience it runs, not what is asked."""


async def environment_of(environment: AskedEnvironment) -> dict[str, Any]:
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
        shown = await environment.shown(problem)
        digest.update(json.dumps(shown, sort_keys=True, default=str).encode())
        if (i + 1) & i == 0 or i + 1 == count:
            digests[str(i + 1)] = digest.hexdigest()
        if time.monotonic() > end:
            break
    own = {} if environment.identity is None else {"own": environment.identity}
    return {"problems": count, "messages": digests, **own}


def same_environment(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two identities agree in everything that both contain."""
    parts, others = one.get("environments"), other.get("environments")
    if parts is not None or others is not None:  # several
        if parts is None or others is None or len(parts) != len(others):
            return False
        pairs = zip(parts, others, strict=True)
        return all(
            (a["label"], a["weight"]) == (b["label"], b["weight"]) and same_environment(a, b)
            for a, b in pairs
        )
    if one["problems"] != other["problems"]:
        return False
    if "messages" in one and "messages" in other and one.get("own") != other.get("own"):
        return False
    seen = one.get("messages", {}).keys() & other.get("messages", {}).keys()
    most = max(seen, key=int, default=None)
    return most is None or one["messages"][most] == other["messages"][most]


def orchestrator_recipe(config: OrchestratorConfig, *environments: Environment) -> dict[str, Any]:
    """The orchestrator's part of a run's recipe. `environments`: all of the run, in order.

    Returns:
        `settings`, and `environment`, the identity. Of several environments, the identity is `problems`, the
        sum, and `environments`, a list with the identity, label and weight of each; and `environments` has
        the settings of each, by label.

    Raises:
        EnvironmentFailed: a problem has no conversation.
    """
    each = list(zip(config.of_environments(), environments, strict=True))

    async def identify() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for own, environment in each:
            with ask(environment, own) as asked:
                found.append(await environment_of(asked))
        return found

    identities = run_async(identify())
    settings = _settings(config, ORCHESTRATOR)
    if not config.environments:
        return {"settings": settings, "environment": identities[0]}
    whole = [
        {"label": one.called, "weight": one.weight, **identity}
        for one, identity in zip(config.environments, identities, strict=True)
    ]
    return {
        "settings": {name: value for name, value in settings.items() if not is_setting(name, OF_ENVIRONMENT)},
        "environments": {own.environment.called: _settings(own, OF_ENVIRONMENT) for own, _ in each},
        "environment": {"problems": sum(one["problems"] for one in whole), "environments": whole},
    }


def _settings(config: OrchestratorConfig, allowed: Settings) -> dict[str, Any]:
    found = settings_of(config.model_dump(), allowed)
    return _as_compared(found) | code_in(found)


def _as_compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those arguments of the environment that a resumed run compares.

    Of an agent's variables, only the names: their values may be secrets, and recipes are in checkpoints.
    """
    name, args = settings.get("environment.name"), settings.get("environment.args")
    if name not in NOT_COMPARED or not isinstance(args, Mapping):
        return dict(settings)
    kept = {key: value for key, value in args.items() if key not in NOT_COMPARED[name]}
    if name == "agent" and "env" in kept:
        kept["env"] = sorted(kept["env"])
    return {**settings, "environment.args": kept}


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
    settings = _as_compared(_under_new_names(saved["settings"]))
    changes = changed_settings(settings, recipe["settings"], ORCHESTRATOR)
    before, after = saved.get("environments", {}), recipe.get("environments", {})
    for label in after:
        own = changed_settings(_as_compared(before.get(label, {})), after[label], OF_ENVIRONMENT)
        changes += [replace(change, name=f"environments.{label}.{change.name}") for change in own]
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
