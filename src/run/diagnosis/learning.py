"""Rules about what a step learns from: the gradient, groups of answers, and where answers end."""

from collections.abc import Iterator

from cairn.run.diagnosis.rule import Finding, MetricGroup, RuleInput, level_of, percent
from cairn.run.jsonlines import Row
from cairn.run.metrics import number


class NothingLearned:
    """Steps whose gradient is exactly 0: the weights have not changed, or only decayed."""

    window = 16
    shares = (0.25, 0.9)
    """Of the steps; the first such step is told whatever its share."""
    fewest = 4
    """Steps before a share counts."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        judged = [row for row in seen.rows if number(row, "grad_norm") is not None]
        empty = [row for row in judged if number(row, "grad_norm") == 0 and not row.get("skipped_updates")]
        if not empty:
            return
        level = 1 + (level_of(len(empty) / len(judged), self.shares) if len(judged) >= self.fewest else 0)
        if len(empty) == 1:
            what = f"step {empty[0]['step']} taught nothing: its gradient is 0"
        else:
            what = f"{len(empty)} of {len(judged)} steps taught nothing: their gradient is 0"
        why = [reason for row in empty if (reason := self._why(row))]
        what += f" ({why[-1]})" if why else ""
        yield Finding("nothing learned", level, what, self._advice(empty[-1], seen.place))

    @staticmethod
    def _why(row: Row) -> str | None:
        groups, unlearned = number(row, "groups"), number(row, "groups/unlearned")
        if groups and groups == unlearned:
            return f"nothing to compare in any of the {groups:.0f} prompts of step {row['step']}"
        if number(row, "learned_tokens") == 0:
            return f"step {row['step']} has no token to learn"
        return None

    @staticmethod
    def _advice(row: Row, place: str) -> str:
        if number(row, "reward/mean") is not None:
            return (
                f"`rollouts {place}` shows the rewards that the answers to one prompt get; "
                "orchestrator.redraw replaces prompts whose answers are all alike"
            )
        return "Look at what the loss is of: which records, roles and tokens are learned, and how many"


class NoSpread:
    """Prompts from which nothing is learned, since their answers are compared and all have the same "
    "reward."""

    window = 8
    shares = (0.75, 0.95)
    fewest = 8
    """Groups, of two or more steps, before a share counts; half as many do if none has a spread."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        for part in seen.environments():
            if found := self._look(seen, part):
                yield found

    def _look(self, seen: RuleInput, part: MetricGroup) -> Finding | None:
        groups, flat = (seen.sum(part.prefix + name) for name in ("groups", "groups/unlearned"))
        steps = len([count for count in seen.values(f"{part.prefix}groups") if count])
        enough = self.fewest / 2 if flat == groups else self.fewest
        if steps < 2 or groups < enough:
            return None
        level = level_of(flat / groups, self.shares)
        if not level:
            return None
        best, worst = (seen.sum(part.prefix + name) for name in ("groups/all_best", "groups/all_worst"))
        kinds = [f"{best:.0f} all right"] if best else []
        kinds += [f"{worst:.0f} all wrong"] if worst else []
        kinds = [f"all answers alike: {', '.join(kinds)}"] if kinds else ["all answers alike"]
        what = (
            f"{flat:.0f} of {groups:.0f} prompts{part.of} taught nothing in {seen.steps} ({'; '.join(kinds)})"
        )
        return Finding(f"no spread{part.of}", level, what, self._advice(seen, flat / groups, best, worst))

    @staticmethod
    def _advice(seen: RuleInput, share: float, best: float, worst: float) -> str:
        samples = seen.setting("orchestrator.samples_per_prompt")
        more = "raise orchestrator.samples_per_prompt" + (f" ({samples} now)" if samples else "")
        functions = seen.setting("orchestrator.environment.args.rewards")
        if share == 1 and functions:
            return (
                "A function that compares answers, as TRL's get them, needs group = true in its table of "
                f"rewards; else {more}, or choose other problems"
            )
        if worst > best:
            return f"The problems are too hard so far: easier ones, a reward for parts of it, or {more}"
        if best > worst:
            return (
                "The problems are too easy by now: harder ones, or orchestrator.pools.easy, which lets "
                "solved ones rest"
            )
        return f"Let the reward tell answers apart, {more}, or set orchestrator.redraw"


class AnswersCutOff:
    """Answers that the limit of tokens has cut off: the reward sees their beginning, and they never end."""

    window = 4
    shares = (0.5, 0.95)

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        for part in seen.environments():
            share = seen.mean(f"{part.prefix}rollout/cut_off")
            if share is None or len(seen.rows) < 2 or not (level := level_of(share, self.shares)):
                continue
            limit = seen.setting("orchestrator.sampling.max_tokens")
            what = f"{percent(share)} of the answers{part.of} were cut off in {seen.steps}"
            advice = (
                f"Raise orchestrator.sampling.max_tokens{f' ({limit} now)' if limit else ''}, and "
                "inference.max_model_len if the servers' context is full; or let the model learn to end first"
            )
            yield Finding(f"cut off{part.of}", level, what, advice)


class SummedScores:
    """Named rewards in verl's manner, `score` beside what is only to be logged, of which the sum counts."""

    window = 2
    near = 1e-6

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        for part in seen.environments():
            for row in seen.rows:
                if names := self._summed(row, f"{part.prefix}reward/"):
                    others = ", ".join(names)
                    total = number(row, f"{part.prefix}reward/mean")
                    what = f"the reward{part.of} is the sum of score, {others}: {total:.4g}"
                    zeros = ", ".join(f'"{name}": 0' for name in names)
                    advice = (
                        "verl counts score alone. If that is meant, return Rewards({...}, "
                        f"weights={{{zeros}}}); if the sum is meant, call the part something else than score"
                    )
                    yield Finding(f"summed scores{part.of}", 1, what, advice)
                    break

    def _summed(self, row: Row, prefix: str) -> list[str]:
        """The parts beside `score`, if the reward is the sum of all; of a row without these, none."""
        names = [name.removeprefix(prefix).removesuffix("/mean") for name in row if name.startswith(prefix)]
        parts = {name: number(row, f"{prefix}{name}/mean") for name in names}
        means = {name: value for name, value in parts.items() if value is not None and name != "compared"}
        total = number(row, f"{prefix}mean")
        others = [name for name in means if name != "score" and means[name]]
        if total is None or "score" not in means or not others:
            return []
        near = self.near * max(1.0, sum(map(abs, means.values())))
        return others if abs(total - sum(means.values())) <= near else []
