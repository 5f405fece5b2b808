"""How two recipes differ: the recipe of a checkpoint, and that of the run which goes on from it."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from cairn.run.errors import UsageError
from cairn.run.recipe import ENTRY, OWN_CLASSES, Compared, covers, is_within, plain

DECIDED_BY = {
    "ckpt.interval": "spike.on_spike",
    "scheduler.steps": "scheduler.type",
    "critic.scheduler.steps": "critic.scheduler.type",
    "loss": "loss.type",
    "optimizer": "optimizer.type",
    "critic.optimizer": "critic.optimizer.type",
}
"""Settings that are there or not depending on another one, which says so already if it has changed."""
MEASURED_OTHERWISE = {
    "validation": ("data", "records"),
    "eval": ("environment", "problems", "samples", "right_from", "sampling"),
}
"""Of these lists, what determines the numbers that come out."""
IDENTITIES = ("].data", "].environment")
"""How names of changes end that are of records or problems, which are compared by content."""


@dataclass(frozen=True)
class Change:
    """A difference between the recipe of a checkpoint and that of the run that goes on from it.

    accept: what `--ckpt.accept-changes` calls it, where going on needs that; else None.
    """

    name: str
    was: Any
    now: Any
    accept: str | None = None

    def at(self, step: int, accepted: bool) -> dict[str, Any]:
        """As it is kept in all later checkpoints; `step` is the last one with the recipe of before."""
        about = asdict(self)
        del about["accept"]
        return {"step": step, **about, "accepted": accepted}


@dataclass(frozen=True)
class Settings:
    """The settings of a saved recipe.

    free: what was left out of it; None: that is not known, as of another program's checkpoint, so that a
    setting which it lacks may have had any value.
    """

    values: Mapping[str, Any]
    free: frozenset[str] | None = None

    @classmethod
    def of(cls, part: Mapping[str, Any]) -> "Settings":
        """Those of a role's part of a recipe, or of one of its environments."""
        free: Iterable[str] | None = part.get("free")
        return cls(part.get("settings", {}), None if free is None else frozenset(free))

    def has_had(self, name: str) -> bool:
        """Whether the recipe would have a setting of this name, had it existed."""
        return self.free is not None and not is_within(name, self.free)

    def changes(
        self, now: Mapping[str, Any], compared: Compared, defaults: Mapping[str, Any]
    ) -> list[Change]:
        """How the settings differ that are known of both.

        A section, or a table with a name, that was off and is on, or the other way round, is one change. A
        setting that did not exist yet counts as having had its default.
        """
        saved = self.values
        found = [
            (name, saved[name], now[name])
            for name in now
            if name in saved and saved[name] != now[name] and not _is_of_another(name, saved, now)
        ]
        turned = {name: (None, _inside(now, name)) for name in self._off(saved, now)}
        turned |= {name: (_inside(saved, name), None) for name in self._off(now, saved)}
        found = [one for one in found if one[0] not in turned]
        found += [(name, was, after) for name, (was, after) in turned.items()]
        changed = {name for name, _, _ in found}
        for name in [name for name in now if name not in saved]:
            is_told = _is_in_any(name, turned) or _decider(name) in changed or name.endswith(".code")
            if not is_told and self.has_had(name) and now[name] != defaults.get(name):
                found.append((name, defaults.get(name), now[name]))
        return [Change(name, was, after, compared.accept(name) or None) for name, was, after in found]

    def unknown(self, now: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
        """The settings that can't be compared, because the recipe says nothing about them; sorted.

        Those that have their default are left out: it is what they were as long as they did not exist. Of
        tables with a name only that is given.
        """
        changed = {name for name in now if name in self.values and self.values[name] != now[name]}
        names = [name for name in now if name not in self.values and not self.has_had(name)]
        entries = {match[0] for name in names if (match := ENTRY.match(name))}
        others = {
            name
            for name in names
            if not ENTRY.match(name)
            and defaults.get(name) not in (now[name], "auto")  # auto: now is what was chosen for the machine
            and not name.endswith(".code")
            and _decider(name) not in changed
            and not any(self.values.get(above, 0) is None for above in _above(name))
        }
        return sorted(entries | others)

    def _off(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
        """The sections and named tables that are off in `one`, as far as is known, and on in `other`."""
        on = dict.fromkeys(above for name in other for above in _above(name))
        off = [name for name in on if one.get(name, 0) is None]
        if self.free is not None:
            there = {above for name in one for above in _above(name)}
            off += [name for name in on if ENTRY.fullmatch(name) and name not in there]
        return off


def _above(name: str) -> list[str]:
    """The sections that a setting is in, the outermost first; an entry of a list is a section."""
    parts = re.findall(r"\w+(?:\[[^\]]*\])?", name)
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _inside(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {
        name.removeprefix(f"{section}."): value
        for name, value in settings.items()
        if name.startswith(f"{section}.")
    }


def _is_in_any(name: str, sections: Collection[str]) -> bool:
    return any(above in sections for above in _above(name))


def _decider(name: str) -> str | None:
    """The setting that decides whether there is one of this name."""
    return next((decider for key, decider in DECIDED_BY.items() if covers(key, name)), None)


def _is_of_another(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a digest of code is that of another class than before, which its name says already."""
    section, _, key = name.rpartition(".")
    setting, _ = OWN_CLASSES.get(plain(section), (None, None))
    chosen_by = f"{section}.{setting}"
    return key == "code" and saved.get(chosen_by) != now.get(chosen_by)


def measured_anew(changes: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """What is measured otherwise than before, as a recipe's changes say.

    Returns:
        By the beginning of the metrics' names, such as validation/NAME/, the last step of each other way to
        measure, or of other records or problems, in order: numbers up to there can't be compared with later
        ones.
    """
    found: dict[str, set[int]] = {}
    for change in changes:
        if (match := ENTRY.match(change["name"])) is None:
            continue
        section, name = match.groups()
        rest = change["name"][match.end() :].lstrip(".")
        if not rest or rest.split(".")[0] in MEASURED_OTHERWISE.get(section, ()):
            found.setdefault(f"{section}/{name}/", set()).add(int(change["step"]))
    return {prefix: sorted(steps) for prefix, steps in found.items()}


def check_accepted(
    changes: Collection[Change], accepted: Collection[str], checkpoint: Path, flags: str = "--"
) -> None:
    """See that the user accepts all changes that break a promise.

    Args:
        accepted: what `--ckpt.accept-changes` names.
        flags: what the flags of these settings begin with.

    Raises:
        UsageError: naming those that are not accepted, with both values.
    """
    refused = [(change, change.accept) for change in changes if change.accept]
    refused = [(change, name) for change, name in refused if name not in accepted]
    if refused:
        names = ",".join(dict.fromkeys(name for _, name in refused))
        lines = "\n".join(f"  {in_words(change, flags)}" for change, _ in refused)
        raise UsageError(
            f"{checkpoint} was made with another recipe, and going on with this one would break what is "
            f"promised of the run (what was there -> what is here):\n{lines}\nGive what was there, or accept "
            f"it with --ckpt.accept-changes {names}; all later checkpoints then say so"
        )


def in_words(change: Change, flags: str = "--") -> str:
    """A change for people, on one line."""
    section, _, key = change.name.rpartition(".")
    if key == "code":
        return f"{flags}{section}: the code of the class was edited ({change.was[:12]} -> {change.now[:12]})"
    if change.name in ("data", "environment") or change.name.endswith(IDENTITIES):
        return f"{_setting(change, flags)}: {short_identity(change.was)} -> {short_identity(change.now)}"
    kinds: list[object] = [type(value) for value in (change.was, change.now)]
    turned = kinds in ([dict, type(None)], [type(None), dict])

    def show(value: Any) -> str:
        return "off" if turned and value is None else json.dumps(value)

    return f"{_setting(change, flags)}: {show(change.was)} -> {show(change.now)}"


def _setting(change: Change, flags: str) -> str:
    """Where the user has set it: a flag, or tables of the configuration, which have none."""
    if ENTRY.match(change.name):
        return flags.removeprefix("--") + change.name
    if change.name != "data":
        return flags + change.name.replace("_", "-")
    if isinstance(change.now, Mapping) and "sets" in cast(Mapping[str, Any], change.now):
        return f"{flags.removeprefix('--')}data.sets"
    return f"{flags}data.name"


def short_identity(value: Mapping[str, Any] | str) -> str:
    """An identity for people: how many records or problems, and the beginning of a digest."""
    if isinstance(value, str):
        return value[:12]
    if sets := cast("list[Mapping[str, Any]] | None", value.get("sets")):
        return "; ".join(f"{one['label']} x {one['weight']:g}: {short_identity(one)}" for one in sets)
    if stream := value.get("stream") or value.get("stream_of"):
        return f"a stream ({stream[:12]})"
    what = "records" if "records" in value else "problems"
    digests = value.get("content") or value.get("digest") or value.get("messages")
    if isinstance(digests, Mapping):
        by_count = cast(Mapping[str, str], digests)
        digests = by_count[max(by_count, key=int)]
    if parts := cast("list[Mapping[str, Any]] | None", value.get("environments")):
        return "; ".join(f"{part['label']} x {part['weight']:g}: {short_identity(part)}" for part in parts)
    own = f", {value['own']}" if "own" in value else ""
    return f"{value[what]} {what}{own} ({digests[:12] if digests else 'content unknown'})"
