"""Sampling: has a prompt's answers generated and rewarded, and records them in the ledger piece by piece."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from cairn.orchestrator.completion.chat import StopWatch, shown_text, stopped_at_its_end
from cairn.orchestrator.completion.completion import Completer, PromptRefused
from cairn.orchestrator.environments import SingleTurn
from cairn.orchestrator.environments.calls import shortened
from cairn.orchestrator.environments.protocol import ANSWER, UNSCORED
from cairn.orchestrator.environments.single_turn import GroupRewarded
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.policy.errors import RequestRefused
from cairn.policy.generation import SamplingParams
from cairn.run.conversations import NoPrompt
from cairn.run.faults import fault_point
from cairn.run.noted_calls import UserCall
from cairn.run.seeds import answer_seed

logger = logging.getLogger(__name__)

Single = TypeVar("Single", bound=SingleTurn)


class Sampler(Completer[Single]):
    """Has the servers answer the run's prompts, and the environment reward the answers.

    Long answers are requested in pieces of `sampling.chunk_tokens`. A piece is recorded in the ledger before
    the next one is requested, and each piece has its own seed. So an answer that continues after a crash gets
    the same tokens as without the crash.
    """

    async def complete(self, group: AnswerGroup) -> AnswerGroup:
        """Sample and reward the answers of the group that are missing or partial.

        Where the conversation gives no usable prompt for this model and these servers, or they refuse it, all
        answers that are not whole have failed.

        Raises:
            Exception: the servers' client gives up.
        """
        n, seed = self.config.samples_per_prompt, self._seed(group, 0)
        asks = self._call("messages", group, seed)
        if not group.prompt_ids and (failure := await self.retrying.failure(lambda: self._ask(group), asks)):
            group.rollouts = [Rollout(seed + i, failed=failure) for i in range(n)]
            return group
        if not group.rollouts:
            group.rollouts = [Rollout(seed + i, begun=time.monotonic()) for i in range(n)]
            try:
                await self._sample(group, {i: self._watch() for i in range(n)}, seed)
            except PromptRefused as refused:
                logger.warning("%s", refused)
                group.rollouts = [Rollout(seed + i, failed=str(refused)) for i in range(n)]
                return group
        whole = [i for i, rollout in enumerate(group.rollouts) if rollout.finish_reason is not None]
        partial = [i for i in range(len(group.rollouts)) if i not in whole]
        await asyncio.gather(self._reward(group, whole), *(self._finish(group, i) for i in partial))
        fault_point("orchestrator.finished_group")
        return group

    def _call(self, method: str, group: AnswerGroup, seed: int) -> UserCall:
        """A call of the environment's, as it is noted while it is in progress."""
        about = f"environment {self.environment.name!r}: {method} of problem {group.problem}"
        return UserCall(f"{about}, {seed}", about, about)

    async def _finish(self, group: AnswerGroup, i: int) -> None:
        """Sample the rest of answer `i` piece by piece, then have it rewarded."""
        rollout = group.rollouts[i]
        try:
            await self._sample_rest(group, i)
        except PromptRefused as refused:
            logger.warning("%s", refused)
            rollout.failed = str(refused)
            self.ledger.record(group.place, {i: rollout})
        else:
            await self._reward(group, [i])

    async def _sample_rest(self, group: AnswerGroup, i: int) -> None:
        """Sample the rest of answer `i` piece by piece.

        Raises:
            PromptRefused: the servers do not take it any more.
        """
        rollout, watch = group.rollouts[i], self._watch()
        if (stopped := watch.feed(rollout.token_ids)) is not None:  # the settings were others when it began
            rollout.cut(stopped.tokens)
            self.ledger.record(group.place, {i: rollout})
        while rollout.finish_reason is None:
            done = len(rollout.token_ids)
            if done >= self._longest(group):  # a server with a smaller context has joined
                rollout.finish_reason = "length"
                break
            seed = self._seed(group, *divmod(done, self.config.sampling.chunk)) + i
            await self._sample(group, {i: watch}, seed)

    async def _reward(self, group: AnswerGroup, numbers: list[int]) -> None:
        """Have the environment reward the whole answers in `numbers` that have no reward yet; record them."""
        rollouts = {i: group.rollouts[i] for i in numbers if group.rollouts[i].reward is None}

        async def reward(rollout: Rollout) -> None:
            rollout.text = self._shown(rollout)

            async def attempt() -> None:
                found = await self.environment.reward(group.problem, rollout.text)
                rollout.reward, rollout.parts = found

            call = self._call("reward", group, rollout.seed)
            answer = f"{ANSWER}{shortened(rollout.text)}"
            rollout.failed = await self.retrying.failure(attempt, call, answer)
            rollout.note_seconds()

        await asyncio.gather(*map(reward, rollouts.values()))
        if rollouts:
            self.ledger.record(group.place, rollouts)

    def _shown(self, rollout: Rollout) -> str:
        """The text of a whole answer, as its environment sees it."""
        ids, end = rollout.token_ids, rollout.finish_reason
        stopped = stopped_at_its_end(self.chat, self.config.sampling.stop, ids, end)
        return shown_text(self.chat, ids, stopped)

    async def _ask(self, group: AnswerGroup) -> None:
        """Have the environment say what the group's prompt is, and record it."""
        group.prompt_ids = self._prompt(group.problem, await self.environment.messages(group.problem))
        self.ledger.set_prompt(group)

    def _prompt(self, problem: int, messages: list[Mapping[str, Any]]) -> list[int]:
        """The conversation's tokens, rendered with the model's chat template."""
        try:
            return self.chat.prompt(messages)
        except NoPrompt as error:
            about = f"environment {self.config.environment.called!r}, problem {problem}"
            raise PromptRefused(f"{about}: {error}") from error

    def _longest(self, group: AnswerGroup) -> int:
        """Maximum tokens of an answer: `sampling.max_tokens`, or less if the servers' context is smaller.

        Raises:
            PromptRefused: the context leaves no room for an answer.
        """
        limit, prompt = self.servers.max_model_len, len(group.prompt_ids)
        if limit is None:
            return self.config.sampling.max_tokens
        if prompt >= limit:
            raise PromptRefused(
                f"environment {self.config.environment.called!r}, problem {group.problem}: its prompt has "
                f"{prompt} tokens, but prompt and answer together may have at most {limit} on the servers; "
                "raise the servers' --max-model-len (on rl, --inference.max-model-len), or remove the "
                "problem from the environment"
            )
        return min(self.config.sampling.max_tokens, limit - prompt)

    def _watch(self) -> StopWatch:
        """What looks for the run's stop strings in an answer."""
        return StopWatch(self.chat, self.config.sampling.stop)

    def _seed(self, group: AnswerGroup, chunk: int, within: int = 0) -> int:
        """The seed of the group's first answer from token `within` of piece `chunk` on; answer i adds i."""
        return answer_seed(self.config.seed, group.place, group.policy_step, chunk, within)

    async def _sample(self, group: AnswerGroup, watches: Mapping[int, StopWatch], seed: int) -> None:
        """Sample and record the next piece of these answers, which must all have the same length so far.

        Args:
            watches: by number of the answer; each has seen its tokens so far.
        """
        numbers = list(watches)
        first = group.rollouts[numbers[0]]
        so_far, longest, piece = first.token_ids, self._longest(group), self.config.sampling.chunk
        asked = min(piece - len(so_far) % piece, longest - len(so_far))
        before = len(group.prompt_ids) + len(so_far) if so_far else 0
        params = SamplingParams(
            max_tokens=asked,
            n=len(numbers),
            temperature=self.config.sampling.temperature,
            seed=seed,
            stop_token_ids=self.chat.stop_token_ids,
            stop=tuple(self.config.sampling.stop),
            experts_from=self.experts_from(before),
        )
        try:
            pieces = await self.servers.generate(
                [*group.prompt_ids, *so_far],
                params,
                affinity=group.place,
                versions=self.versions,
                began=first.began,
                sessions=numbers,
            )
        except RequestRefused as error:
            about = f"environment {self.config.environment.called!r}, problem {group.problem}"
            raise PromptRefused(f"{about}: {error}") from error
        for i, found in zip(numbers, pieces, strict=True):
            generation, wanted = watches[i].cut(found, asked)
            group.rollouts[i].extend(generation, asked=wanted, longest=longest)
        self.ledger.record(group.place, {i: group.rollouts[i] for i in numbers})


# Sampling for environments that compare the answers to a problem: one call rewards a whole group.


class GroupSampler(Sampler[GroupRewarded]):
    """Has the servers answer the run's prompts, and the environment reward all answers to a prompt at once.

    The rewards of a group are in the ledger all together or not at all: after a crash in between, the one
    call is made again, with the same answers in the same order.
    """

    async def complete(self, group: AnswerGroup) -> AnswerGroup:
        """As in `Sampler`; the answers that could be sampled are compared with each other."""
        group = await super().complete(group)
        await self._reward_group(group)
        return group

    async def _reward(self, group: AnswerGroup, numbers: list[int]) -> None:
        """Nothing: an answer alone has no reward."""

    async def _reward_group(self, group: AnswerGroup) -> None:
        """Reward all whole answers of the group, unless all of them are; record that."""
        whole = {i: one for i, one in enumerate(group.rollouts) if one.finish_reason is not None}
        if not whole or all(one.reward is not None for one in whole.values()):
            return
        for rollout in whole.values():
            rollout.text = self._shown(rollout)

        async def attempt() -> None:
            texts = [rollout.text for rollout in whole.values()]
            found = await self.environment.rewards(group.problem, texts)
            for rollout, reward in zip(whole.values(), found, strict=True):
                rollout.reward, rollout.parts = reward or (None, {})

        call = self._call("rewards", group, group.rollouts[0].seed)
        failed = await self.retrying.failure(attempt, call)
        for i, rollout in whole.items():
            if failed is not None:
                rollout.reward, rollout.parts, rollout.failed = None, {}, failed
            elif rollout.reward is None:
                about = f"environment {self.environment.name!r}: rewards of problem {group.problem}"
                rollout.failed = f"{UNSCORED}{about} has None for answer {i}, and so nothing to say of it"
            else:
                rollout.failed = None
            rollout.note_seconds()
        self.ledger.record(group.place, whole)
