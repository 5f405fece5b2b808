"""The prompts that are issued but not in a batch yet."""

import asyncio

from cairn.orchestrator.ledger import Ledger
from cairn.orchestrator.rollouts import AnswerGroup


class Prompts:
    """The prompts that are being answered or ready for a batch, and the place of the next new one."""

    def __init__(self, ledger: Ledger):
        """Begin with the prompts that wait in the ledger."""
        waiting = ledger.waiting()
        self.ready = {group.place: group for group in waiting if group.rollouts and group.whole}
        """Groups with all answers rewarded, by place."""
        self.partial = [group for group in waiting if group.place not in self.ready]
        """Groups that were being answered when an earlier process ended."""
        self.answering: dict[int, tuple[asyncio.Task[AnswerGroup], AnswerGroup]] = {}
        """Groups that are being answered, by place."""
        self._again, self._following = ledger.never_issued()

    def __len__(self) -> int:
        return len(self.ready) + len(self.partial) + len(self.answering)

    def next_place(self) -> int:
        """The place of the next prompt to issue: one that was dropped, or the first new one."""
        if self._again:
            return self._again.pop(0)
        self._following += 1
        return self._following - 1

    def collect(self) -> None:
        """Move complete groups to `ready`; raises the error if answering one has failed."""
        for place, (task, _) in list(self.answering.items()):
            if task.done():
                del self.answering[place]
                self.ready[place] = task.result()

    def older_than(self, step: int) -> list[AnswerGroup]:
        """The groups that have a token from a policy before `step`."""
        groups = [*self.ready.values(), *self.partial, *(group for _, group in self.answering.values())]
        return [group for group in groups if group.oldest_step < step]

    def drop(self, place: int) -> None:
        """Forget the answers to the prompt at `place`, so that it is issued again."""
        self.ready.pop(place, None)
        self.partial = [group for group in self.partial if group.place != place]
        task, _ = self.answering.pop(place, (None, None))
        if task:
            task.cancel()
        self._again = sorted([*self._again, place])
