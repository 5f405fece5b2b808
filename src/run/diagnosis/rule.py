"""What a rule is, what it sees, and what is reported of what it finds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from cairn.run.jsonlines import Row
from cairn.run.metrics import number

ENVIRONMENT = "env/"
"""Begins the names of metrics of one of several environments: `env/LABEL/...`."""


@dataclass(frozen=True)
class Finding:
    """Something that keeps a run from learning what it could.

    rule: which rule found it, and in which environment. level: how bad it is, from 1; it is reported again
    only at a higher one. what: the finding with its numbers, a sentence without a full stop. advice: what
    to do, with the names of the settings; likewise.
    """

    rule: str
    level: int
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}. {self.advice}"


@dataclass(frozen=True)
class DiskRoom:
    """The disk of the run's checkpoints: what is free of it, and the size of the newest one; 0 if none is."""

    free_bytes: int
    step_bytes: int


@dataclass(frozen=True)
class RuleInput:
    """What a rule looks at.

    rows: of metrics.jsonl, in the order of steps. config: the run's resolved configuration, as config.json
    has it; empty if it is unknown. place: the run's directory, for commands that a sentence names. disk: None
    if it is unknown.
    """

    rows: Sequence[Row]
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    place: str = "RUN_DIR"
    disk: DiskRoom | None = None

    def last(self, count: int) -> "RuleInput":
        """The same of the last rows only."""
        return self.of(self.rows[-count:])

    def of(self, rows: Sequence[Row]) -> "RuleInput":
        """The same with other rows."""
        return replace(self, rows=rows)

    def sum(self, key: str) -> float:
        """The sum over all rows that have the metric."""
        return sum(self.values(key))

    def values(self, key: str) -> list[float]:
        """The metric in each row that has it as a number."""
        found = (number(row, key) for row in self.rows)
        return [value for value in found if value is not None]

    def mean(self, key: str) -> float | None:
        """The mean over the rows that have the metric; None if none has it."""
        values = self.values(key)
        return sum(values) / len(values) if values else None

    def setting(self, path: str) -> Any:
        """A setting of the run by its dotted name; None if it is not set or not known."""
        found: Any = self.config
        for name in path.split("."):
            found = cast("Mapping[str, Any]", found).get(name) if isinstance(found, Mapping) else None
        return found

    def environments(self) -> "Iterator[MetricGroup]":
        """The metrics of each environment: of several, one after the other; else of the whole run."""
        labels = dict.fromkeys(
            name.split("/")[1] for row in self.rows for name in row if name.startswith(ENVIRONMENT)
        )
        if not labels:
            yield MetricGroup("", "")
        for label in labels:
            yield MetricGroup(f"{ENVIRONMENT}{label}/", f" of environment {label!r}")

    @property
    def steps(self) -> str:
        """Which steps the rows are of, in words."""
        if not self.rows:
            return "no step"
        first, last = self.rows[0]["step"], self.rows[-1]["step"]
        return f"step {last}" if first == last else f"steps {first} to {last}"


@dataclass(frozen=True)
class MetricGroup:
    """Metrics whose names begin with `prefix`; `of`: whose they are, as a sentence goes on."""

    prefix: str
    of: str


class Rule(Protocol):
    """Finds one kind of fault. It is a function of what it sees: no file, no clock, no state."""

    window: int
    """How many of the newest rows it judges while the run goes on; at the end it is shown all."""

    def look(self, seen: RuleInput) -> Iterable[Finding]:
        """What is found in these rows; mostly nothing."""
        ...


def level_of(value: float, levels: Sequence[float]) -> int:
    """How many of the levels, in ascending order, the value reaches."""
    return sum(value >= level for level in levels)


def percent(share: float) -> str:
    """A share in words; neither 0 % nor 100 % unless it is that."""
    if 0 < share < 0.01:
        return f"{share:.1%}".replace("%", " %")
    if 0.99 < share < 1:
        return "99 %"
    return f"{share:.0%}".replace("%", " %")


def findings(rules: Iterable[Rule], seen: RuleInput) -> list[Finding]:
    """What the rules find in all of the rows."""
    return [finding for rule in rules for finding in rule.look(seen)]


class Diagnosis:
    """Follows a run: each finding is reported when it is first made, and again only once it is clearly
    worse, or the run has gone on with other settings.

    history: the events of history.jsonl, which tell what earlier attempts have reported.
    """

    def __init__(self, rules: Sequence[Rule], history: Iterable[Row] = ()):
        self._rules = rules
        self._told: dict[str, int] = {}
        """The level at which each was reported, by its rule."""
        for event in history:
            if event["event"] == "change":
                self._told.clear()
            elif event["event"] == "diagnosed":
                self._told[event["rule"]] = event["level"]

    def news(self, seen: RuleInput) -> list[Finding]:
        """What is to be reported now."""
        found: list[Finding] = []
        for rule in self._rules:
            for finding in rule.look(seen.last(rule.window)):
                if finding.level > self._told.get(finding.rule, 0):
                    self._told[finding.rule] = finding.level
                    found.append(finding)
        return found

    def outcome(self, seen: RuleInput) -> list[Finding]:
        """What holds for all the rows, with the numbers of the whole."""
        return findings(self._rules, seen)
