"""Rules about samples and records of which less is learned than there is."""

from collections.abc import Iterator

from cairn.run.diagnosis.rule import Finding, RuleInput, level_of, percent


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
