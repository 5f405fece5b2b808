"""Rules about where time and disk go: who waits for whom, stale answers, restarts, saves, a full disk."""

from collections.abc import Iterator

from cairn.run.diagnosis.rule import Finding, RuleInput, level_of, percent
from cairn.run.metrics import number
from cairn.run.output import counted

STARTING = 1
"""Rows at the beginning of an attempt, which wait for everything to start."""


class WhoWaits:
    """A trainer that waits for rollouts or records, or servers that wait for the trainer."""

    window = 16
    fewest = 4
    """Rows before a share counts."""
    least = 0.2
    """Seconds a step below which nobody waits."""
    shares = (0.5, 0.8)
    exact = (0.95,)
    """The same with max_off_policy_steps = 0, with which trainer and servers take turns."""
    records = (0.3, 0.6)
    """The same of a trainer that waits for records."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        rows = seen.rows[STARTING:]
        seen = seen.of(rows)
        wait, wall = seen.sum("time/wait"), seen.sum("time/wait") + seen.sum("time/step")
        if len(rows) < self.fewest or wall / len(rows) < self.least:
            return
        if not seen.values("time/generate"):
            if level := level_of(wait / wall, self.records):
                yield self._records(level, wait / wall, seen)
            return
        ahead = seen.setting("orchestrator.max_off_policy_steps")
        if seen.sum("time/rewards") / wall >= SLOW_REWARDS:
            return  # they are what is waited for
        if level := level_of(wait / wall, self.exact if ahead == 0 else self.shares):
            yield Finding(
                "the trainer waits",
                level,
                f"the trainer waits {percent(wait / wall)} of the time for rollouts in {seen.steps}",
                "Add servers, or raise orchestrator.max_off_policy_steps"
                + ("" if ahead is None else f" ({ahead} now)"),
            )
        idle = min(seen.sum("time/server_idle") / wall, 1.0)
        if ahead and (level := level_of(idle, self.shares)):
            yield Finding(
                "the servers wait",
                level,
                f"the servers have nothing to do for {percent(idle)} of the time in {seen.steps}: they wait "
                "for the trainer",
                "Give the trainer more ranks (trainer.workers) or the run fewer servers; a larger "
                "orchestrator.max_off_policy_steps moves the wait and does not shorten it",
            )

    @staticmethod
    def _records(level: int, share: float, seen: RuleInput) -> Finding:
        return Finding(
            "the trainer waits",
            level,
            f"the trainer waits {percent(share)} of the time for records in {seen.steps}",
            "Reading and tokenising them takes longer than a step: keep them on a local disk, shorten "
            "them, or take data.read = indexed, which tokenises once",
        )


SLOW_REWARDS = 0.5
"""Share of the time from which rewards are what servers and trainer wait for (`SlowRewards`)."""


class StaleAnswers:
    """Finished answers that are thrown away, because the policy has moved on too far since."""

    window = 16
    shares = (0.05, 0.25)
    fewest = 16
    """Prompts before a share counts."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        dropped, used = seen.sum("groups/dropped"), seen.sum("groups")
        total = dropped + used
        if total < self.fewest or not (level := level_of(dropped / total, self.shares)):
            return
        steps = seen.setting("orchestrator.max_off_policy_steps")
        yield Finding(
            "stale answers",
            level,
            f"the answers to {dropped:.0f} of {total:.0f} prompts were dropped in {seen.steps}: they were "
            "older than max_off_policy_steps allows",
            "Raise orchestrator.max_off_policy_steps"
            + ("" if steps is None else f" ({steps} now)")
            + ", lower "
            "orchestrator.max_in_flight, or shorten the longest answers (orchestrator.sampling.max_tokens)",
        )


class ManyRestarts:
    """Roles that die again and again: the run goes on and loses time."""

    window = 1
    counts = (3, 10)

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        row = seen.rows[-1] if seen.rows else {}
        count = number(row, "run/restarts") or 0.0
        if not (level := level_of(count, self.counts)):
            return
        prefix = "run/restarts/"
        roles = {name.removeprefix(prefix): number(row, name) for name in row if name.startswith(prefix)}
        worst = [f"{role} {times:.0f} times" for role, times in sorted(roles.items()) if times]
        again, goodput = number(row, "run/recomputed_steps") or 0.0, number(row, "run/goodput")
        cost = [f"{counted(int(again), 'step')} recomputed"] if again else []
        cost += [f"goodput {goodput:.2f}"] if goodput is not None else []
        what = f"roles were restarted: {', '.join(worst) or f'{count:.0f} times'}"
        yield Finding(
            "restarts",
            level,
            f"{what} ({', '.join(cost)})" if cost else what,
            f"`{seen.place}/history.jsonl` has each one's reason, and logs/ what the role said before it",
        )


class IdleRanks:
    """Ranks that wait for others with larger micro-batches, or have none."""

    window = 16
    fewest = 4
    """Rows before a share counts."""
    shares = (0.3, 0.6)

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        busy = seen.values("busy_ranks")
        if len(busy) < self.fewest:
            return
        idle = 1 - sum(busy) / len(busy)
        if level := level_of(idle, self.shares):
            yield Finding(
                "idle ranks",
                level,
                f"each rank waits {percent(idle)} of a step for others in {seen.steps}: the step's samples "
                "fill too few micro-batches, or unequal ones",
                "Lower micro_batch_size (or micro_batch_tokens), so that there are more micro-batches, give "
                "a step more samples, or take fewer ranks (workers)",
            )


class SlowSaves:
    """Saves that training stands still for, or that take longer than the steps between two of them."""

    window = 64
    shares = (0.05, 0.2)
    """Of the time, that training stood still."""
    fewest = 2
    """Saves before they are judged."""

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        seen = seen.of(seen.rows[STARTING:])
        stalls, durable = seen.values("time/save_stall"), seen.values("time/save")
        wall = seen.sum("time/wait") + seen.sum("time/step")
        if len(stalls) < self.fewest or wall <= 0:
            return
        if not (level := level_of(sum(stalls) / (wall + sum(stalls)), self.shares)):
            return
        yield Finding(
            "slow saves",
            level,
            f"training stood still for saves during {percent(sum(stalls) / (wall + sum(stalls)))} of the "
            f"time in {seen.steps}: {max(stalls):.3g} s at most, and {max(durable, default=0.0):.3g} s "
            "until a step was durable",
            "Save less often (ckpt.interval; `ckpt plan` says how often), or to a faster disk (ckpt.dir)",
        )


class DiskFills:
    """A disk without room for the checkpoints to come."""

    window = 1

    def look(self, seen: RuleInput) -> Iterator[Finding]:
        disk = seen.disk
        if disk is None or not disk.step_bytes or not seen.rows:
            return
        room = disk.free_bytes // disk.step_bytes
        keeps = next(
            (kept for name in ("keep_last", "keep") if (kept := seen.setting(f"ckpt.{name}")) is not None),
            None,
        )
        step, last, interval = seen.rows[-1]["step"], seen.setting("max_steps"), seen.setting("ckpt.interval")
        due: int | None = None
        if type(last) is int and type(interval) is int and interval > 0:
            due = last // interval - step // interval + bool(last % interval)
        if keeps is not None:
            due = 1 if due is None else min(due, 1)  # an old step goes when a new one is there
        if due is None or room >= due:
            return
        sizes = f"{_size(disk.free_bytes)} are free, and a checkpoint takes {_size(disk.step_bytes)}"
        if not room:
            what = f"the disk has no room for another checkpoint: {sizes}"
        else:
            what = f"the disk has room for {room} of the {due} checkpoints to come: {sizes}"
        yield Finding(
            "disk",
            2 if not room else 1,
            what,
            f"Free some of it (`ckpt prune {seen.place}`), keep fewer steps (ckpt.keep_last), or save to "
            "another disk (ckpt.dir) or an object store (ckpt.remote)",
        )


def _size(count: int) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    size, units = float(count), ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.3g} {units[0]}"
