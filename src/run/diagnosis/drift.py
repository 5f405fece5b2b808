"""Rules about where training leads: entropy, distance to the reference, ratios, and results on other data."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from cairn.run.diagnosis.rule import Finding, RuleInput, level_of, percent
from cairn.run.jsonlines import Row
from cairn.run.metrics import number


def _around(seen: RuleInput, step: int, key: str) -> tuple[float, float] | None:
    """Means of a metric in the newest four rows up to `step` and after it; None if either has none."""
    before = seen.of([row for row in seen.rows if row["step"] <= step][-4:]).mean(key)
    after = seen.of([row for row in seen.rows if row["step"] > step][-4:]).mean(key)
    return None if before is None or after is None else (before, after)


def _results(rows: Sequence[Row], key: str, step_of: str = "step") -> list[tuple[int, float]]:
    """Each result of an evaluation once, with the step that it is of: later rows repeat the newest one."""
    found: dict[int, float] = {}
    for row in rows:
        value, step = number(row, key), number(row, step_of)
        if value is not None and step is not None and step == step // 1:
            found[int(step)] = value
    return sorted(found.items())


class EntropyCollapse:
    """Entropy of the policy that falls to almost nothing while the reward does not rise.

    A policy that has learned a task is sure of its answers, too; so the entropy alone is no fault.
    """

    window = 256
    part = 8
    """Rows at the beginning and at the end that are compared."""
    shares = (0.85, 0.97)
    """Of the entropy, lost between the two."""
    gain = 0.1
    """Rise of the mean reward, as a share of its range, above which the policy has learned something."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        rows = [row for row in seen.rows if number(row, "entropy") is not None]
        if len(rows) < 2 * self.part:
            return
        first, last = rows[: self.part], rows[-self.part :]
        before, after = seen.of(first).mean("entropy"), seen.of(last).mean("entropy")
        if not before or after is None or before <= 0:
            return
        level = level_of(1 - after / before, self.shares)
        if not level or self._learned(seen.of(first), seen.of(last), seen.of(rows)):
            return
        yield Finding(
            "entropy collapse",
            level,
            f"the policy's entropy fell from {before:.3g} to {after:.3g} between steps {first[0]['step']} "
            f"and {last[-1]['step']}, and the reward did not rise: nearly all answers to a prompt are the "
            "same",
            "Lower optimizer.lr, raise orchestrator.sampling.temperature or the loss's clip_high, or give "
            "trainer.kl a reference that holds the policy back",
        )

    def _learned(self, first: RuleInput, last: RuleInput, seen: RuleInput) -> bool:
        before, after = first.mean("reward/mean"), last.mean("reward/mean")
        if before is None or after is None:
            return True
        lowest = min(seen.values("reward/min"), default=0.0)
        highest = max(seen.values("reward/max"), default=1.0)
        return after - before > self.gain * max(highest - lowest, 1e-9)


class PolicyDrift:
    """A policy that is far from its reference, or from the policy that sampled the answers."""

    window = 8
    kl = (1.0, 5.0)
    """Nats per token to the reference."""
    clipped = (0.3, 0.6)
    """Share of the tokens whose ratio was clipped."""
    mismatch = (0.1, 0.5)
    """Mean difference of logprobs of trainer and server for one policy; bfloat16 alone makes 0.02."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        kl, clipped, mismatch = (
            seen.mean(key) for key in ("kl/reference", "ratio/clipped", "mismatch/logprob")
        )
        if len(seen.rows) < 2:
            return
        if kl is not None and (level := level_of(kl, self.kl)):
            yield Finding(
                "kl to the reference",
                level,
                f"the policy is {kl:.3g} nats per token away from the reference in {seen.steps}",
                "Lower optimizer.lr, or raise the coefficient of trainer.kl",
            )
        if clipped is not None and (level := level_of(clipped, self.clipped)):
            yield Finding(
                "clipped ratios",
                level,
                f"the ratio of {percent(clipped)} of the tokens was clipped in {seen.steps}: they teach "
                "nothing",
                "Lower optimizer.lr, updates per batch, or orchestrator.max_off_policy_steps, so that the "
                "policy stays near the one that sampled",
            )
        if mismatch is not None and (level := level_of(abs(mismatch), self.mismatch)):
            yield Finding(
                "mismatch with the servers",
                level,
                f"trainer and servers differ by {abs(mismatch):.3g} in the logprobs of the same policy and "
                f"tokens in {seen.steps}",
                "Give both the same data type (inference.dtype, precision.compute) and attention; a mixture "
                "of experts also trainer.router_replay = true, so that rounding changes no choice. A "
                "server that computes something else alone is named in servers/disagreed/<host:port>",
            )


class LargestGaps:
    """Single tokens about whose logprobs trainer and servers differ by more than rounding can make."""

    window = 8
    fewest = 4
    """Steps before a median counts."""
    gaps = (5.0, 10.0)
    """Nats: of the largest gap of a step, the median of the steps, so that one odd answer is no finding. They
    are ratios of 150 and of 22,000. In bfloat16 a logprob is off by about 3 % of 1 + its size (`ROUNDING` in
    messages.py), also for a token of one in a million by less than one nat."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        gaps = sorted(seen.values("mismatch/logprob_max"))
        middle = gaps[len(gaps) // 2] if len(gaps) >= self.fewest else 0.0
        if not (level := level_of(middle, self.gaps)):
            return
        stale = max(seen.values("staleness/max"), default=0.0) > 0
        older = "; part of it may be learned meanwhile, unless orchestrator.max_off_policy_steps = 0"
        yield Finding(
            "largest gaps",
            level,
            f"in half of {seen.steps} the logprob of some token differs by {middle:.3g} or more between "
            "trainer and servers; rounding makes less than 1",
            "With trainer.keep_tokens_gb, dash colours tokens by the gap: are they of one kind, or of one "
            f"answer? trainer.loss.importance bounds what such tokens do{older if stale else ''}",
        )


class EvaluationFalls:
    """Reward in training that rises while an evaluation of the same run falls."""

    window = 512
    fewest = 3
    """Results of an evaluation before it is judged."""
    falls = (0.1, 0.3)
    """Of the best result so far, as a share of it, in both of the newest two results."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        keys = dict.fromkeys(
            key for row in seen.rows for key in row if key.startswith("eval/") and key.endswith("/reward")
        )
        for key in keys:
            name = key.removeprefix("eval/").removesuffix("/reward")
            results = _results(seen.rows, key, f"eval/{name}/step")
            if len(results) < self.fewest:
                continue
            best_step, best = max(results, key=lambda one: one[1])
            now = max(value for _, value in results[-2:])
            level = level_of((best - now) / abs(best), self.falls) if best else 0
            around = _around(seen, best_step, "reward/mean")
            if not level or around is None or not around[1] > around[0]:
                continue
            before, after = around
            yield Finding(
                f"evaluation {name!r} falls",
                level,
                f"evaluation {name!r} fell from {best:.4g} at step {best_step} to {results[-1][1]:.4g} at "
                f"step {results[-1][0]}, while the reward in training rose from {before:.4g} to {after:.4g}",
                "The policy learns what the reward in training pays and not the task: look at its best "
                f"answers (`rollouts {seen.place} --best 20`); ckpt.keep_best keeps the step whose "
                "evaluation is best",
            )


class Overfitting:
    """Loss of a validation that rises for several times while the loss of training falls."""

    window = 2048
    rises = 3
    """Results in a row, each above the one before."""
    shares = (0.02, 0.2)
    """Of the lowest loss, above it."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        keys = dict.fromkeys(
            key for row in seen.rows for key in row if key.startswith("validation/") and key.endswith("/loss")
        )
        for key in keys:
            results = _results(seen.rows, key)
            newest = results[-self.rises - 1 :]
            if len(newest) <= self.rises or not all(one[1] < other[1] for one, other in pairwise(newest)):
                continue
            step, lowest = min(results, key=lambda one: one[1])
            level = level_of(newest[-1][1] / lowest - 1, self.shares) if lowest > 0 else 0
            around = _around(seen, step, "loss")
            if not level or around is None or around[1] >= around[0]:
                continue
            before, after = around
            name = key.removeprefix("validation/").removesuffix("/loss")
            yield Finding(
                f"validation {name!r} rises",
                level,
                f"the loss of validation {name!r} rose from {lowest:.4g} at step {step} to "
                f"{newest[-1][1]:.4g} at step {newest[-1][0]}, while the loss of training fell from "
                f"{before:.4g} to {after:.4g}",
                "The model learns these records by heart: stop here (patience in the [[validation]] table), "
                f"take step {step} (ckpt.keep_best keeps it), or train on more records and fewer epochs",
            )
