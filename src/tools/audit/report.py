"""The result of an audit: violations, notes, and what became of each epoch."""

from dataclasses import asdict, dataclass, field
from typing import Any

from cairn.config.kinds import kind_of

Row = dict[str, Any]


@dataclass(frozen=True)
class Violation:
    """A broken promise: its kind, what is wrong, and the rows that show it."""

    kind: str
    what: str
    rows: list[Any] = field(default_factory=list)


@dataclass
class Epoch:
    """What became of the prompts (RL) or records (SFT) of one epoch."""

    epoch: int
    problems: int | None
    issued: int = 0
    trained: int = 0
    waiting: int = 0
    """Issued, answered or shipped, but not trained on yet."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of dropped tries by reason; their prompts are issued again."""
    failed: int = 0
    """Given up: too many of their answers had failed, or all had the same reward (redraw)."""
    resting: int = 0
    """Never issued, because their problems rested (pools)."""
    repeated: int = 0
    missing: int = 0
    environment: str | None = None
    """Its label, in a run with several."""


@dataclass
class Segment:
    """Consecutive steps with the same inputs: identities of data, environment and tokenizer."""

    first_step: int
    last_step: int
    inputs: dict[str, Any]


@dataclass
class Report:
    """The result. `staleness`: the maximum number of steps that a token's policy was behind."""

    run: str
    command: str
    first_step: int | None = None
    last_step: int | None = None
    checkpoints: list[int] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    trained_on: list[Segment] = field(default_factory=list)
    failed_answers: int = 0
    """Answers that failed and were left out of batches, as far as no checkpoint covers these."""
    staleness: int | None = None
    max_off_policy_steps: int | None = None
    changes: list[dict[str, Any]] = field(default_factory=list)
    """Changes of the recipe on the way, each with the step after which it applies."""
    proved: list[str] = field(default_factory=list)
    """What these files prove, if there is no violation."""
    unproved: list[str] = field(default_factory=list)
    """What they don't: what may be otherwise without the audit noticing it."""
    violations: list[Violation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Findings that are no violations, because too little is left to decide."""

    @property
    def ok(self) -> bool:
        """Whether all promises were kept."""
        return not self.violations

    @property
    def epochs_of(self) -> str:
        """What its epochs consist of: records or prompts."""
        return kind_of(self.command).epochs_of

    def broken(self, kind: str, what: str, *rows: Any) -> None:
        """Add a violation."""
        self.violations.append(Violation(kind, what, list(rows)))

    def to_json(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {"ok": self.ok, **asdict(self)}
