"""What identifies an environment, so that a resumed run notices when its problems have changed."""

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cairn.checkpoint.step_folder import OrchestratorRecord, StepFolder
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments import AskedEnvironment, Environment, EnvironmentFailed, ask
from cairn.run.changes import Change, Settings
from cairn.run.recipe import OF_ENVIRONMENT, ORCHESTRATOR, code_in, is_within, plain, settings_of
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


def orchestrator_recipe(
    config: OrchestratorConfig,
    *environments: Environment,
    evaluated: Mapping[str, Environment] = MappingProxyType({}),
) -> dict[str, Any]:
    """The orchestrator's part of a run's recipe.

    Args:
        environments: all of the run, in order.
        evaluated: the environments of its evaluations, by name.

    Returns:
        `settings`; `free`, which settings were left out; `environment`, the identity; and `evaluations`, the
        identity of each one's environment, by name. Of several environments, the identity is `problems`, the
        sum, and `environments`, a list with the identity, label and weight of each; and `environments` has
        the settings of each, by label.

    Raises:
        EnvironmentFailed: a problem has no conversation.
    """
    each = list(zip(config.of_environments(), environments, strict=True))

    measuring = [(one.name, config.of_evaluation(one)) for one in config.eval if one.name in evaluated]

    async def identify() -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
        found: list[dict[str, Any]] = []
        for own, environment in each:
            with ask(environment, own) as asked:
                found.append(await environment_of(asked))
        measured: dict[str, dict[str, Any]] = {}
        for name, own in measuring:
            with contextlib.suppress(EnvironmentFailed), ask(evaluated[name], own) as asked:
                measured[name] = await environment_of(asked)  # one that fails costs its evaluation only
        return found, measured

    identities, measured = run_async(identify())
    found: dict[str, Any] = {"settings": _settings(config), "free": sorted(ORCHESTRATOR.free)}
    if measured:
        found["evaluations"] = measured
    if not config.environments:
        return {**found, "environment": identities[0]}
    whole = [
        {"label": one.called, "weight": one.weight, **identity}
        for one, identity in zip(config.environments, identities, strict=True)
    ]
    return {
        **found,
        "settings": _others(found["settings"]),
        "environments": {own.environment.called: _of_environment(_settings(own)) for own, _ in each},
        "environment": {"problems": sum(one["problems"] for one in whole), "environments": whole},
    }


def _settings(config: OrchestratorConfig) -> dict[str, Any]:
    found = settings_of(config.model_dump(), ORCHESTRATOR)
    return _as_compared(found) | code_in(found)


def _of_environment(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings that each of several environments has for itself."""
    return {name: value for name, value in settings.items() if is_within(name, OF_ENVIRONMENT)}


def _others(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are the same for all environments."""
    return {name: value for name, value in settings.items() if not is_within(name, OF_ENVIRONMENT)}


def _as_compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those arguments of environments that a resumed run compares.

    Of an agent's variables, only the names: their values may be secrets, and recipes are in checkpoints.
    """
    found = dict(settings)
    for key, name in settings.items():
        if plain(key) not in ("environment.name", "eval.environment.name") or name not in NOT_COMPARED:
            continue
        of_args = f"{key.removesuffix('name')}args"
        args = settings.get(of_args)
        if isinstance(args, Mapping):
            kept = {arg: value for arg, value in args.items() if arg not in NOT_COMPARED[name]}
            if name == "agent" and "env" in kept:
                kept["env"] = sorted(kept["env"])
            found[of_args] = kept
    return found


def changes_since(checkpoint: Path, recipe: Mapping[str, Any]) -> list[Change]:
    """How the orchestrator's recipe differs from a checkpoint's recipe.

    Checkpoints of older versions contain only the environment's settings and its number of problems.
    """
    saved, changes = _saved(checkpoint), list[Change]()
    for label, before, settings in _pairs(saved, recipe):
        own = before.changes(settings, ORCHESTRATOR, _defaults())
        changes += [replace(change, name=f"{label}{change.name}") for change in own]
    earlier = saved.get("evaluations", {})
    for name, now in recipe.get("evaluations", {}).items():
        if name in earlier and not same_environment(earlier[name], now):
            changes.append(Change(f"eval[{name}].environment", earlier[name], now))
    was, now = saved.get("environment"), recipe["environment"]
    if was and not same_environment(was, now):
        changes.append(Change("environment", was, now, "environment"))
    return changes


def unknown_since(checkpoint: Path, recipe: Mapping[str, Any]) -> list[str]:
    """The orchestrator's settings of which that checkpoint says nothing, so that they can't be compared."""
    pairs = _pairs(_saved(checkpoint), recipe)
    return [f"{label}{name}" for label, before, now in pairs for name in before.unknown(now, _defaults())]


def _saved(checkpoint: Path) -> Mapping[str, Any]:
    """The orchestrator's recipe in a checkpoint."""
    state = StepFolder(checkpoint).orchestrator_state() or OrchestratorRecord()
    prompts = state.prompts
    return state.recipe or {
        "settings": settings_of({"environment": prompts.get("environment", {})}, ORCHESTRATOR),
        **({"environment": {"problems": prompts["problems"]}} if "problems" in prompts else {}),
    }


def _pairs(
    saved: Mapping[str, Any], recipe: Mapping[str, Any]
) -> list[tuple[str, Settings, Mapping[str, Any]]]:
    """What is compared: what names of changes begin with, and settings before and now.

    Where one environment has become several, or the other way round, only what all have in common is.
    """
    before, after = saved.get("environments", {}), recipe.get("environments", {})
    now = recipe["settings"] if bool(before) == bool(after) else _others(recipe["settings"])
    free = saved.get("free")
    pairs = [("", saved["settings"], now)]
    pairs += [(f"environments.{label}.", before[label], after[label]) for label in after if label in before]
    return [
        (label, Settings.of({"settings": _as_compared(was), "free": free}), settings)
        for label, was, settings in pairs
    ]


@functools.cache
def _defaults() -> Mapping[str, Any]:
    return settings_of(OrchestratorConfig().model_dump(), ORCHESTRATOR)
