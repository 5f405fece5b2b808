"""What came of drawing recorded answers again: tokens and logprobs beside those that a run has recorded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cairn.config.shared import RolloutKey
from cairn.run.messages import rounding
from cairn.run.metrics import ranges_of
from cairn.tools.replay.comparison import Verdict, first_of
from cairn.tools.replay.sampled import SampledSpan

MIXED = (
    "they come from keys and values that an earlier policy has left, and the weights of all of these policies"
    " are not there (--orchestrator.recompute-kv-cache has them computed anew)"
)
KINDS = {
    (False, False): "logprobs of these tokens",
    (True, False): "logprobs of the recorded tokens, which the server was given",
    (False, True): "logprobs of recorded tokens, from keys and values of earlier policies, by transformers",
}
"""What logprobs are of: by whether a server was given the tokens, and whether transformers was."""
NOT_AT_ONE = (
    "a server gives the logprobs of given tokens at temperature 1 only, and these were sampled at another one"
)


@dataclass
class SpanReplayed:
    """One span of tokens, beside what a server gives now.

    drawn: the tokens that the span's seed draws now; None: they were not drawn again. logprobs: of the
    recorded tokens, from the first on, under the span's policy; of those drawn, up to the first that differs.
    given: whether the server was given the recorded tokens (teacher forcing), rather than that it drew them.
    by_transformers: whether transformers was, which had keys and values of earlier policies. not_compared:
    why there are no logprobs. exact: whether tokens and logprobs must be the same to the bit. dtypes: of the
    computations, then and now.
    """

    span: SampledSpan
    exact: bool
    dtypes: tuple[str, ...]
    bound: float | None = None
    drawn: list[int] | None = None
    logprobs: list[float] = field(default_factory=list[float])
    given: bool = False
    by_transformers: bool = False
    not_compared: str = ""

    @property
    def parted(self) -> int | None:
        """The first token of the span that is drawn otherwise, counted from its answer's first token."""
        if self.drawn is None:
            return None
        pairs = zip(self.span.token_ids, self.drawn, strict=False)
        least = min(len(self.span.token_ids), len(self.drawn))
        at = next((i for i, (was, now) in enumerate(pairs) if was != now), least)
        return None if at == len(self.span.token_ids) else self.span.start + at

    @property
    def apart(self) -> list[float]:
        """How far each logprob that was compared is from the recorded one; infinite if one is no number."""
        was = np.asarray(self.span.logprobs[: len(self.logprobs)], np.float32).astype(np.float64)
        found = np.abs(np.asarray(self.logprobs, np.float32).astype(np.float64) - was)
        return np.where(np.isnan(found), math.inf, found).tolist()

    @property
    def allowed(self) -> float:
        """The mean difference of its logprobs that counts as rounding."""
        if self.bound is not None:
            return self.bound
        return rounding(self.dtypes, self.span.logprobs[: len(self.logprobs)] or [0.0])

    @property
    def mean(self) -> float:
        """The mean difference of its logprobs; 0 if none were compared."""
        return math.fsum(self.apart) / len(self.apart) if self.logprobs else 0.0

    @property
    def verdict(self) -> Verdict | None:
        """Whether what was compared agrees; None if nothing was."""
        if not self.logprobs and self.parted is None:
            return None
        if self.parted is None and not any(self.apart):
            return "same"
        return "close" if self.logprobs and self.mean <= self.allowed else "other"

    @property
    def ok(self) -> bool:
        """Whether it agrees as far as it must."""
        return self.verdict in (None, "same") or (self.verdict == "close" and not self.exact)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        span = self.span
        return {
            "turn": span.turn,
            "start": span.start,
            "tokens": len(span.token_ids),
            "policy": str(span.policy),
            "verdict": self.verdict,
            "exact": self.exact,
            "drawn_again": self.drawn is not None,
            "not_drawn": "" if self.drawn is not None else span.not_drawn,
            "first_other_token": self.parted,
            "logprobs": len(self.logprobs),
            "of_given_tokens": self.given,
            "by_transformers": self.by_transformers,
            "not_compared": self.not_compared,
            "mean_difference": self.mean,
            "largest_difference": max(self.apart, default=0.0),
            "bound": self.allowed,
        }


@dataclass
class RolloutReplayed:
    """What came of asking for a whole rollout again.

    server: that was asked, in words. altered: parameters that a given server held with other values than the
    policy whose name it had. changes: what differs between then and now and may explain others, in words.
    """

    key: RolloutKey
    server: str
    spans: list[SpanReplayed]
    altered: list[str] = field(default_factory=list[str])
    changes: list[str] = field(default_factory=list[str])

    @property
    def compared(self) -> list[SpanReplayed]:
        """Those of which something was compared."""
        return [one for one in self.spans if one.verdict is not None]

    @property
    def verdict(self) -> Verdict:
        """Whether what was compared agrees with what is recorded, and how far."""
        found = {one.verdict for one in self.compared}
        return "other" if "other" in found else "close" if "close" in found else "same"

    @property
    def ok(self) -> bool:
        """Whether all agrees as far as it must."""
        return all(one.ok for one in self.spans) and not self.altered

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "rollout": str(self.key),
            "server": self.server,
            "ok": self.ok,
            "verdict": self.verdict,
            "cause": self.cause(),
            "altered": self.altered,
            "changes": self.changes,
            "spans": [one.to_json() for one in self.spans],
        }

    def lines(self, top: int) -> list[str]:
        """For people; at most `top` differences of a kind."""
        spans = self.spans
        steps = ranges_of({one.span.policy.step for one in spans})
        turns = len({one.span.turn for one in spans})
        total = _tokens(spans)
        said = [
            f"rollout {self.key} again: {turns} turn{'s' * (turns > 1)}, {total} tokens, by the policy of "
            f"step {steps}, at {self.server}:"
        ]
        drawn = [one for one in spans if one.drawn is not None]
        parted = [one for one in drawn if one.parted is not None]
        if drawn and not parted:
            said.append(f"  {_tokens(drawn)} tokens, drawn again with the run's seeds: the same")
        said += first_of([_parting(one) for one in parted], top, "pieces more whose tokens differ")
        for kind, whose in KINDS.items():
            of_kind = [one for one in spans if (one.given, one.by_transformers) == kind and one.logprobs]
            said += [f"  {line}" for line in _of_logprobs(of_kind, whose)]
        given_only = [one for one in spans if one.given and one.drawn is None and one.logprobs]
        for why in dict.fromkeys(one.span.not_drawn for one in given_only):
            left = [one for one in given_only if one.span.not_drawn == why]
            said.append(f"  {_tokens(left)} tokens are not drawn again: {why}")
        for why in dict.fromkeys(one.not_compared for one in spans if one.not_compared):
            left = [one for one in spans if one.not_compared == why]
            said.append(f"  {_tokens(left)} tokens are not compared: {why}")
        altered = [f"the server held other values: {name}" for name in self.altered]
        said += first_of(altered, top, "parameters more")
        said += [f"  other than then: {change}" for change in self.changes]
        return [*said, f"  {self.in_words()}"]

    def in_words(self) -> str:
        """What follows."""
        if not all(one.ok for one in self.spans):
            return f"NOT what the run's policies give: {self.cause()}"
        if self.altered:
            return f"NOT what the server held: {self.cause()}"
        if self.verdict == "close":
            mean = max(one.mean for one in self.compared)
            return f"within rounding (logprobs {mean:.2g} apart on average); bits may differ here"
        compared, total = _tokens(self.compared), _tokens(self.spans)
        part = "this answer" if compared == total else f"{compared} of these {total} tokens"
        return f"proved: the run's policies have sampled {part}"

    def cause(self) -> str:
        """What the differences say of where they come from; empty if there are none."""
        wrong = [one for one in self.spans if not one.ok]
        far = [one for one in wrong if one.logprobs and one.mean > one.allowed]
        if far:
            at = far[0]
            first = next(i for i, distance in enumerate(at.apart) if distance > at.allowed)
            if at.by_transformers:
                return (
                    f"from token {at.span.start + first} of turn {at.span.turn} on, the run's server gave "
                    "other logprobs than its policies do: it had other weights, or computed wrongly, or what "
                    "is recorded was altered; or it had so little room for keys and values that it computed "
                    "a request's again in the middle of it (preemption)"
                )
            return (
                f"from token {at.span.start + first} of turn {at.span.turn} on, the run's server computed "
                "other logprobs than the policy gives: it had other weights (one flipped bit is enough), or "
                "computed wrongly, or what is recorded was altered"
            )
        if any(one.parted is not None for one in wrong):
            return (
                "the policy gives the recorded tokens their logprobs, but the seed draws others: they were "
                "sampled with another seed or other settings, by another version of vLLM, or with a logit "
                "that was computed wrongly"
            )
        if wrong:
            return (
                "the tokens are the same, and their logprobs differ by less than rounding makes, where "
                "nothing is rounded otherwise: a low bit of a weight was another one, or this is another "
                "kind of processor or version of vLLM"
            )
        if self.altered:
            return (
                "the answer is what the policy gives, whose name the server had for other values: its memory "
                "was altered. It has the right ones now"
            )
        return ""


def _tokens(spans: Sequence[SpanReplayed]) -> int:
    return sum(len(one.span.token_ids) for one in spans)


def _parting(one: SpanReplayed) -> str:
    """The first token of a span that is drawn otherwise."""
    assert one.drawn is not None
    assert one.parted is not None
    at = one.parted - one.span.start
    now = str(one.drawn[at]) if at < len(one.drawn) else "the answer's end"
    was = one.span.token_ids[at]
    return f"turn {one.span.turn}, token {one.parted}: was {was}, and the run's seed draws {now}"


def _number(logprob: float) -> str:
    """Of float32, with all the digits that tell it from others."""
    return str(np.float32(logprob))


def _of_logprobs(spans: Sequence[SpanReplayed], whose: str) -> list[str]:
    """What was compared of the logprobs, of tokens that were drawn again or given to the server."""
    if not spans:
        return []
    count = sum(len(one.logprobs) for one in spans)
    apart = [(distance, one, i) for one in spans for i, distance in enumerate(one.apart)]
    if not any(distance for distance, _, _ in apart):
        return [f"{count} {whose}: the same to the bit"]
    largest, one, i = max(apart, key=lambda found: found[0])
    mean = math.fsum(distance for distance, _, _ in apart) / count
    return [
        f"{count} {whose}: {mean:.2g} apart on average, and {largest:.2g} at most (turn {one.span.turn}, "
        f"token {one.span.start + i}: {_number(one.span.logprobs[i])} -> {_number(one.logprobs[i])})"
    ]
