"""What became of every second of a run (computed, waited, saved, started, lost) and of every token.

It is made from metrics.jsonl, history.jsonl and evals.jsonl, and of RL runs from the ledger, which knows of
tokens that no row has yet. The wall time of a row
(`run/wall_seconds`) counts from the run's first attempt and leaves out the time between attempts; what lies
between two rows and is neither a step nor its wait is time that a start, a restart or a save has taken.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.checkpoint.manifest import CheckpointError
from cairn.run.history import Costs, WorkClock
from cairn.run.jsonlines import Row
from cairn.run.metrics import count_of, number
from cairn.run.output import duration
from cairn.run.spans import TimeSpan, phases_of
from cairn.run.view import RunView

if TYPE_CHECKING:
    from cairn.orchestrator.ledger import LedgerTokens

ORDER: tuple[str, ...] = ("computed", "waited", "saved", "started", "lost", "other")
"""The kinds of time, in the order in which they are shown; all of them together are the wall time."""
PHASES = 5
"""Kinds of work of a role that are shown, those that took longest."""
MEANING = {
    "computed": "steps that count",
    "waited": "the trainer waited for rollouts or records, in steps that count",
    "saved": "training stood still for saves",
    "started": "from the start of an attempt to its first step, also that no server could answer yet",
    "lost": "steps that were done again, and restarts of roles",
    "other": "between steps, and since the newest one",
}


@dataclass(frozen=True)
class TimeAccount:
    """Seconds of a run by what became of them, and those in which no process of it was running."""

    seconds: dict[str, float]
    idle: float

    @property
    def wall(self) -> float:
        """Seconds in which somebody was at work on the run."""
        return sum(self.seconds.values())

    @property
    def ettr(self) -> float:
        """Effective training time ratio: computed and waited time over the wall time; 1.0 before any time."""
        useful = self.seconds["computed"] + self.seconds["waited"]
        return useful / self.wall if self.wall > 0 else 1.0

    def cost(self, per_hour: float) -> float:
        """What the wall time has cost, in the unit of `per_hour`."""
        return self.wall / 3600 * per_hour

    def price(self, per_hour: float) -> dict[str, float]:
        """What each kind of time has cost, in the unit of `per_hour`."""
        return {kind: seconds / 3600 * per_hour for kind, seconds in self.seconds.items()}


def time_account(rows: Sequence[Row], history: Sequence[Row], costs: Costs) -> TimeAccount:
    """The account of a run until now.

    Args:
        rows: of metrics.jsonl; those of steps that were done again are not among them any more.
        history: of history.jsonl.
        costs: of the run until now; their wall time is what the account adds up to.
    """
    seconds: dict[str, float] = dict.fromkeys(ORDER, 0.0)
    before: Row | None = None
    end = 0.0
    clock = WorkClock(history)
    for row in rows:
        step, start = number(row, "time/step") or 0.0, number(row, "time/start") or 0.0
        wait = max((number(row, "time/wait") or 0.0) - start, 0.0)
        wall = number(row, "run/wall_seconds")
        seconds["computed"] += step
        disturbed = before is not None and _restarts(row) > _restarts(before)
        seconds["lost" if disturbed else "waited"] += wait
        if wall is None:
            seconds["started"] += start
            continue
        rest = max(wall - end - step - wait, 0.0)
        end = max(end, wall)
        stall = min(number(row, "time/save_stall") or 0.0, rest)
        seconds["saved"] += stall
        rest -= stall
        if before is None or _began_between(clock.later, number(before, "run/wall_seconds") or 0.0, wall):
            again = before is not None and (number(row, "run/recomputed_steps") or 0.0) > (
                number(before, "run/recomputed_steps") or 0.0
            )
            seconds["lost" if again else "started"] += rest
        else:
            seconds["lost" if disturbed else "other"] += rest
        before = row
    missing = max(costs.wall_seconds - sum(seconds.values()), 0.0)
    seconds["started" if before is None else "other"] += missing
    return TimeAccount(seconds, clock.idle)


def account_rows(account: TimeAccount) -> list[list[str]]:
    """The account as rows of a table: kind of time, how long, share, and what it is; none before any time."""
    return [
        [kind, duration(seconds), f"{seconds / account.wall:.0%}", MEANING[kind]]
        for kind in ORDER
        if account.wall > 0
        for seconds in [account.seconds[kind]]
    ]


def phase_rows(spans: Iterable[TimeSpan]) -> list[list[object]]:
    """Where the time of each role's main thread went: role, what it did, how long, share; longest first."""
    rows: list[list[object]] = []
    for role, phases in phases_of(spans).items():
        whole = max(sum(phases.values()), 1e-9)
        for name, seconds in sorted(phases.items(), key=lambda item: -item[1])[:PHASES]:
            rows.append([role, name, duration(seconds), f"{seconds / whole:.0%}"])
    return rows


def _restarts(row: Row) -> float:
    return number(row, "run/restarts") or 0.0


def _began_between(later: Sequence[float], low: float, high: float) -> bool:
    """Whether an attempt began from `low` on and before `high`, in seconds of wall time."""
    place = bisect_left(later, low)
    return place < len(later) and later[place] < high


def sentence(account: TimeAccount) -> str:
    """The account of time in one sentence."""
    shares = {kind: account.seconds[kind] / account.wall for kind in ORDER} if account.wall > 0 else {}
    worst = [kind for kind in sorted(shares, key=lambda kind: -shares[kind]) if kind != "computed"][:2]
    parts = [f"{shares[kind]:.0%} {kind}" for kind in worst if shares[kind] >= 0.005]
    computed = f"{shares.get('computed', 0.0):.0%} of the run's time was computed"
    return f"{computed}; {', '.join(parts)}; goodput (ETTR) {account.ettr:.2f}" if parts else computed


# Tokens


FATES: dict[str, str] = {
    "trained": "learned from, in steps that count",
    "unlearned": "in a batch, but nothing is learned from them: no spread, masked, or cut off",
    "failed": "of answers that failed, and of prompts that were given up because of them",
    "redrawn": "of prompts that others took the place of, since nothing could be learned from them",
    "dropped": "of answers that had become too old, or came from another temperature",
    "waiting": "in no batch yet, or in one that is not trained on yet",
    "evaluated": "of answers in evaluations",
    "repeated": "trained on again, since the steps after a checkpoint were lost",
}
"""What becomes of tokens, in the order in which it is shown; all of them together are the run's tokens."""


@dataclass(frozen=True)
class TokenAccount:
    """Tokens of a run by what became of them.

    In RL they are tokens that were sampled, those of several turns and branches once; otherwise tokens to
    learn from. Only `repeated` ones are counted a second time, as often as they were trained on again.
    """

    tokens: dict[str, int]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.tokens.values())

    def share(self, fate: str) -> float:
        """The part of all tokens that this became of; 0.0 before any token."""
        return self.tokens[fate] / self.total if self.total else 0.0

    def price(self, whole: float) -> dict[str, float]:
        """What the tokens of each kind have cost, of the `whole` that the run has cost."""
        return {fate: self.share(fate) * whole for fate in FATES}


def tokens_of(view: RunView) -> TokenAccount:
    """The account of a run's tokens until now.

    Raises:
        DamagedFile: metrics.jsonl or history.jsonl as a whole can't be read.
    """
    rows = view.metrics()
    return token_account(
        rows, view.costs(), view.known_evals(), _beyond(view, rows[-1]["step"] if rows else 0)
    )


def _beyond(view: RunView, step: int) -> "LedgerTokens | None":
    """What the ledger has beyond the rows up to `step`; None if there is no ledger, or it can't be read."""
    if not view.run.ledger.exists():
        return None
    from cairn.orchestrator.ledger import is_quiet, read_tokens  # takes a while to import

    try:
        return read_tokens(view.run.ledger, step, immutable=is_quiet(view.run))
    except CheckpointError:  # the page of the ledger says what is wrong with it
        return None


def token_account(
    rows: Sequence[Row], costs: Costs, evals: Sequence[Row] = (), beyond: "LedgerTokens | None" = None
) -> TokenAccount:
    """The account of a run's tokens until now.

    Args:
        rows: of metrics.jsonl; those of earlier versions of Cairn do not say what was thrown away.
        costs: of the run until now.
        evals: of evals.jsonl.
        beyond: what the ledger has beyond these rows; without it, what waits is what waited at the newest.
    """
    tokens = dict.fromkeys(FATES, 0)
    for row in rows:
        sampled, lost = count_of(row, "rollout/tokens"), count_of(row, "lost_tokens")
        unlearned = min(count_of(row, "tokens/unlearned") + lost, sampled) if sampled else lost
        tokens["unlearned"] += unlearned
        tokens["trained"] += sampled - unlearned if sampled else count_of(row, "learned_tokens")
        for fate in ("failed", "redrawn", "dropped"):
            tokens[fate] += count_of(row, f"tokens/{fate}")
    tokens["waiting"] = count_of(rows[-1], "tokens/waiting") if rows else 0
    if beyond is not None:
        tokens["waiting"] = beyond.waiting
        for fate, count in beyond.thrown.items():
            tokens[fate] += count
    for row in evals:
        mean = number(row, "tokens") or 0.0
        tokens["evaluated"] += max(round(mean * count_of(row, "samples")), 0)
    tokens["repeated"] = costs.recomputed_tokens
    return TokenAccount(tokens)


def token_rows(account: TokenAccount) -> list[list[str]]:
    """The account as rows of a table: what became of them, how many, share, and what it is; the fates that
    no token has are left out."""
    return [
        [fate, f"{account.tokens[fate]:,}", f"{account.share(fate):.0%}", what]
        for fate, what in FATES.items()
        if account.tokens[fate]
    ]


def token_sentence(account: TokenAccount, whole: float | None = None) -> str:
    """The account of tokens in one sentence; whole: what the run has cost."""
    if not account.total:
        return "no token yet"
    rest = sorted((fate for fate in FATES if fate != "trained"), key=lambda fate: -account.tokens[fate])
    parts = [f"{account.share(fate):.0%} {fate}" for fate in rest[:3] if account.share(fate) >= 0.005]
    trained = f"{account.share('trained'):.0%} of {account.total:,} tokens were trained on"
    if whole is not None and account.tokens["trained"]:
        parts.append(f"{whole / account.tokens['trained'] * 1e6:,.2f} a million trained tokens")
    return "; ".join([trained, ", ".join(parts)] if parts else [trained])
