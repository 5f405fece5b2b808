"""Rules about how rollouts and rewards come about: what fails, what is malformed, and what takes the time."""

from collections.abc import Iterator

from cairn.run.diagnosis.rule import Finding, RuleInput, level_of, percent


class GivenUp:
    """Prompts that are in no batch, since too many of their answers failed."""

    window = 64
    shares = (0.1, 0.3)
    """Of the prompts; the first prompt is told whatever its share."""
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
            f"{count}{where} ({percent(failed / prompts)}) given up: their answers failed, so nothing "
            "is learned "
            "from them",
            f"`rollouts {seen.place} --failed` lists them with their reasons; the environment's code "
            "is where "
            "to look, or orchestrator.reward_timeout",
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
    """Steps before it is told."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        for part in seen.environments():
            called = seen.values(f"{part.prefix}rollout/tool_calls")
            malformed = seen.sum(f"{part.prefix}rollout/malformed_calls")
            if len(called) >= self.fewest and not any(called) and not malformed:
                yield Finding(
                    f"no calls{part.of}",
                    1,
                    f"no tool{part.of} was called in {seen.steps}",
                    "RL only strengthens what the model does by itself now and then: show it calls "
                    "first, by SFT or "
                    "in the prompt, and see that orchestrator.tool_parser reads its format",
                )


class SlowRewards:
    """Servers and trainer that wait for rewards most of the time."""

    window = 4
    share = 0.5
    least = 1.0
    """Seconds a step below which nobody waits."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        seen = RuleInput(
            seen.rows[1:], seen.config, seen.place
        )  # the first step waits for everything to start
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
            f"servers and trainer wait for rewards: {min(rewards, wall) / steps:.1f} of "
            f"{wall / steps:.1f} s a "
            f"step ({rewarding:.2g} s for each, after {queued:.2g} s in the queue)",
            f"Raise orchestrator.reward_threads ({threads} now) if the code is thread-safe, write the "
            "reward as a "
            "coroutine, or run it with environment.name = process in several processes"
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
                f"another run pushes weights to the same server: it was found with them {foreign:.0f} "
                "times in "
                f"{seen.steps}; what came from them was dropped and made again",
                "Both runs learn rightly and lose time; give each its own (orchestrator.inference_url)",
            )


# Rules about samples and records of which less is learned than there is.


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
            f"{cut:.0f} of {samples:.0f} {'rollouts' if rl else 'samples'} in {seen.steps} are longer "
            "than a row, "
            f"and {percent(of_tokens)} of the tokens to learn are cut away"
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
            f"Raise seq_len{f' ({length} now)' if length else ''}, or see data.learn and the roles of "
            "the records; "
            "logs/trainer.log names the first of each kind",
        )
