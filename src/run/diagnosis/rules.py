"""The rules: about what a step learns from, how rollouts and rewards come about, and what is not learned."""

from collections.abc import Iterator

from cairn.run.diagnosis.rule import Finding, MetricGroup, RuleInput, level_of, percent
from cairn.run.jsonlines import Row
from cairn.run.metrics import number

# What a step learns from: the gradient, groups of answers, and where answers end.


class NothingLearned:
    """Steps whose gradient is exactly 0: the weights have not changed, or only decayed."""

    window = 16
    shares = (0.25, 0.9)
    """Of the steps; the first such step is reported whatever its share."""
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
        advice = self._advice(empty[-1], seen.place, some=len(empty) < len(judged))
        yield Finding("nothing learned", level, what, advice)

    @staticmethod
    def _why(row: Row) -> str | None:
        groups, unlearned = number(row, "groups"), number(row, "groups/unlearned")
        if groups and groups == unlearned:
            return f"nothing to compare in any of the {groups:.0f} prompts of step {row['step']}"
        if number(row, "learned_tokens") == 0:
            return f"step {row['step']} has no token to learn"
        return None

    @staticmethod
    def _advice(row: Row, place: str, *, some: bool) -> str:
        if number(row, "reward/mean") is not None:
            advice = f"`rollouts {place}` shows the rewards that the answers to one prompt get"
            # Where no prompt has a spread, there is none to replace them by.
            redraw = "; orchestrator.redraw replaces prompts whose answers are all alike"
            return advice + (redraw if some else "")
        return "Look at what the loss is of: which records, roles and tokens are learned, and how many"


class NoSpread:
    """Prompts from which nothing is learned, since their answers are compared and all have the same
    reward."""

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


# How rollouts and rewards come about: what fails, what is malformed, and what takes the time.


class GivenUp:
    """Prompts that are in no batch, since too many of their answers failed."""

    window = 64
    shares = (0.1, 0.3)
    """Of the prompts; the first prompt is reported whatever its share."""
    fewest = 16
    """Prompts before a share counts."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        failed = seen.sum("groups/failed") - seen.sum("groups/unscored")
        if failed <= 0:
            return
        prompts = failed + seen.sum("groups")
        level = 1 + (level_of(failed / prompts, self.shares) if prompts >= self.fewest else 0)
        whose = [part.of for part in seen.environments() if seen.sum(f"{part.prefix}groups/failed")]
        where = whose[0] if len(whose) == 1 else ""
        count = f"{failed:.0f} prompt{'' if failed == 1 else 's'}"
        yield Finding(
            "given up",
            level,
            f"{count}{where} ({percent(failed / prompts)}) given up: their answers failed, so nothing is "
            "learned from them",
            f"`rollouts {seen.place} --failed` lists them with their reasons; the environment's code is "
            "where to look, or orchestrator.reward_timeout",
        )


class FailedAnswers:
    """Answers without a reward, among those to prompts that are trained on."""

    window = 8
    shares = (0.05, 0.25)

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        for part in seen.environments():
            names = ("rollouts/failed", "rollouts/unscored", "rollouts/all")
            missing, unscored, answers = (seen.sum(part.prefix + name) for name in names)
            failed = missing - unscored
            if not answers or not (level := level_of(failed / answers, self.shares)):
                continue
            yield Finding(
                f"failed answers{part.of}",
                level,
                f"{failed:.0f} of {answers:.0f} answers{part.of} failed in {seen.steps}, and are left out",
                f"`rollouts {seen.place} --failed` lists them with their reasons",
            )


class MalformedCalls:
    """Answers in which a tool call begins that the parser can't read; the model takes them for text."""

    window = 4
    shares = (0.1, 0.5)
    """Of all calls."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        for part in seen.environments():
            malformed = seen.mean(f"{part.prefix}rollout/malformed_calls") or 0.0
            called = seen.mean(f"{part.prefix}rollout/tool_calls") or 0.0
            share = malformed / (malformed + called) if malformed else 0.0
            if not (level := level_of(share, self.shares)):
                continue
            parser = seen.setting("orchestrator.tool_parser")
            yield Finding(
                f"malformed calls{part.of}",
                level,
                f"{percent(share)} of the tool calls{part.of} in {seen.steps} can't be read, and "
                "count as text",
                f"See whether orchestrator.tool_parser ({parser or 'none'} now) fits the model and "
                "sampling.max_tokens has room for a call; SFT on calls in the template's own form "
                "teaches them",
            )


class NoCalls:
    """An environment with tools, none of which was ever called."""

    window = 8
    fewest = 4
    """Steps before it is reported."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        for part in seen.environments():
            called = seen.values(f"{part.prefix}rollout/tool_calls")
            malformed = seen.sum(f"{part.prefix}rollout/malformed_calls")
            if len(called) >= self.fewest and not any(called) and not malformed:
                yield Finding(
                    f"no calls{part.of}",
                    1,
                    f"no tool{part.of} was called in {seen.steps}",
                    "RL only strengthens what the model does by itself now and then: show it calls first, by "
                    "SFT or in the prompt, and see that orchestrator.tool_parser reads its format",
                )


class SlowRewards:
    """Servers and trainer that wait for rewards most of the time."""

    window = 4
    share = 0.5
    least = 1.0
    """Seconds a step below which nobody waits."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        seen = seen.of(seen.rows[1:])  # the first step waits for everything to start
        steps = len(seen.rows)
        wall = seen.sum("time/wait") + seen.sum("time/step")
        rewards, idle = seen.sum("time/rewards"), seen.sum("time/server_idle")
        if not steps or wall / steps < self.least or min(rewards, idle) < self.share * wall:
            return
        rewarding, queued = seen.mean("time/reward") or 0.0, seen.mean("time/reward_queue") or 0.0
        threads = seen.setting("orchestrator.reward_threads")
        yield Finding(
            "slow rewards",
            1,
            f"servers and trainer wait for rewards: {min(rewards, wall) / steps:.1f} of {wall / steps:.1f} s "
            f"a step ({rewarding:.2g} s for each, after {queued:.2g} s in the queue)",
            f"Raise orchestrator.reward_threads ({threads} now) if the code is thread-safe, write the reward "
            "as a coroutine, or run it with environment.name = process in several processes"
            if queued >= rewarding / 2 and threads is not None
            else "Make the reward itself faster, or a coroutine that waits for several answers at once",
        )


class OtherPushes:
    """Servers that were found with weights of another run: somebody else uses them."""

    window = 4

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        foreign = seen.sum("servers/foreign_weights")
        if foreign:
            yield Finding(
                "other pushes",
                1,
                f"another run pushes weights to the same server: it was found with them {foreign:.0f} times "
                f"in {seen.steps}; what came from them was dropped and made again",
                "Both runs learn rightly and lose time; give each its own (orchestrator.inference_url)",
            )


class OtherStart:
    """Servers whose start and whose first update have made other parameters of the same files."""

    window = 4

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        if parameters := seen.sum("servers/start_differed"):
            yield Finding(
                "other start",
                1,
                f"a server's start had loaded other values into {parameters:.0f} parameters than the run's "
                "first update from the same files",
                "The run answers from updates, which the probe checks; eval, chat and other clients may not. "
                "The orchestrator's log names the parameters: report them with the model",
            )


# Samples and records of which less is learned than there is.


class CutSamples:
    """Samples that are longer than the trainer's rows, and what is lost of them."""

    window = 8
    rollouts = (0.01, 0.2)
    """Shares of the learned tokens that are lost, or of the samples that are cut: of rollouts, whose ends
    were sampled and rewarded for nothing."""
    records = (0.1, 0.4)
    """The same of the records of a data set, where long documents are usual."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        cut, samples = seen.sum("cut_samples"), seen.sum("samples")
        if not cut or not samples:
            return
        lost, learned = seen.sum("lost_tokens"), seen.sum("learned_tokens")
        of_tokens = lost / (lost + learned) if lost else 0.0
        rl = bool(seen.values("reward/mean"))
        if not (level := level_of(max(cut / samples, of_tokens), self.rollouts if rl else self.records)):
            return
        length = seen.setting("trainer.seq_len" if rl else "seq_len")
        now = f" ({length} now)" if length else ""
        what = (
            f"{cut:.0f} of {samples:.0f} {'rollouts' if rl else 'samples'} in {seen.steps} are longer than a "
            f"row, and {percent(of_tokens)} of the tokens to learn are cut away"
        )
        if rl:
            advice = (
                f"Raise trainer.seq_len{now}, or let rollouts end sooner: inference.max_model_len, "
                "orchestrator.sampling.max_tokens"
            )
        else:
            advice = f"Raise seq_len{now}, or choose with data.too_long what becomes of such records"
        yield Finding("cut samples", level, what, advice)


class UnlearnedRecords:
    """Records that are dropped, or of which no token is learned."""

    window = 16
    shares = (0.1, 0.5)
    fewest = 16
    """Samples before a share counts."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        if seen.values("reward/mean"):
            return
        samples, dropped = seen.sum("samples"), seen.sum("dropped_records")
        unlearned = seen.sum("unlearned_samples")
        taken = samples + dropped
        if taken < self.fewest or not (level := level_of((dropped + unlearned) / taken, self.shares)):
            return
        kinds = [f"{dropped:.0f} dropped as too long"] if dropped else []
        kinds += [f"{unlearned:.0f} without a token to learn"] if unlearned else []
        what = (
            f"nothing is learned of {percent((dropped + unlearned) / taken)} of the records in {seen.steps}"
        )
        length = seen.setting("seq_len")
        yield Finding(
            "unlearned records",
            level,
            f"{what} ({', '.join(kinds)})",
            f"Raise seq_len{f' ({length} now)' if length else ''}, or see data.learn and the roles of the "
            "records; logs/trainer.log names the first of each kind",
        )
