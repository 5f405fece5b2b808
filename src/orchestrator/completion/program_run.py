"""One rollout that is a program: what it asks, what it is answered, and how it ends."""

import asyncio
import hashlib
import json
import logging
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from cairn.orchestrator.completion.answers import AnswerParser
from cairn.orchestrator.completion.chat import StopWatch, shown_text, stopped_at_its_end
from cairn.orchestrator.completion.completion import Completer, PromptRefused
from cairn.orchestrator.completion.conversation import Conversation, TokenContext, Tokens
from cairn.orchestrator.environments import (
    MALFORMED_CALLS,
    EnvironmentFailed,
    Programs,
    Reply,
    Snapshot,
    Unscored,
    no_tool_parser,
)
from cairn.orchestrator.environments.calls import Raised, failed, shortened
from cairn.orchestrator.environments.program import Model
from cairn.orchestrator.environments.protocol import in_parts, says_nothing
from cairn.orchestrator.rollouts import AnswerGroup, Call, Turn
from cairn.policy.errors import RequestRefused
from cairn.policy.generation import SamplingParams
from cairn.run.faults import fault_point
from cairn.run.seeds import turn_seed

logger = logging.getLogger(__name__)


LAST_SECONDS = 5.0
"""How long a program that was cancelled is waited for."""


class ProgramDeadline(AbstractContextManager[None]):
    """Until when a program must have gone on. In its context, time stands still.

    The context is entered while the program waits for the model, which has a deadline of its own, or for a
    free thread. It is no generator: one that is left behind would be resumed when it is collected, and then
    there may be no event loop any more.
    """

    def __init__(self, seconds: float):
        self.timeout = asyncio.timeout(None)
        self._seconds = seconds
        self._paused = 0
        self._ended = False

    def restart(self) -> None:
        """The program has come further: its time begins anew."""
        if self._paused == 0:
            self._move(asyncio.get_running_loop().time() + self._seconds)

    def pause(self) -> None:
        """Time stands still until `unpause` was called as often."""
        self._paused += 1
        self._move(None)

    def unpause(self) -> None:
        """The opposite of `pause`."""
        self._paused -= 1
        self.restart()

    def end(self) -> None:
        """The run is over, though the program may still unpause, as when its world is closed late."""
        self._ended = True

    def _move(self, time: float | None) -> None:
        if not self._ended and not self.timeout.expired():
            self.timeout.reschedule(time)

    def __enter__(self) -> None:
        self.pause()

    def __exit__(self, *raised: object) -> None:
        self.unpause()


class ProgramRun:
    """One program from its start to its end: a state machine, driven by the calls that the program makes.

    Calls are numbered in the order in which the program begins them. What a call does in each state:

    replaying: the ledger has calls of an earlier start (`_recorded`). A call is answered by the one that is
        recorded under its number, if that asks for the same.
    diverged: a call asks for something else. What is recorded from its number on is forgotten.
    going on: nothing is recorded under the call's number. It is made, and recorded before it is answered.
    skipped (`_skipped`): `skip_to` took all recorded calls up to a name. The model can't be asked any more,
        because `_conversation` does not know the skipped turns.
    failed (`_failure`): the model can't answer. The run ends, whatever the program makes of the exception.
    ended (`_ended`): the program has returned or raised, or passed its deadline. A call raises
        CancelledError, and nothing changes what the ledger says of the rollout.
    """

    def __init__(self, runner: Completer[Programs], parser: AnswerParser, group: AnswerGroup, sample: int):
        self.runner = runner
        self.group = group
        self.sample = sample
        self.rollout = group.rollouts[sample]
        self.about = f"rollout {sample} of problem {group.problem}"
        self._recorded = {call.number: call for call in runner.ledger.calls(group.place, sample)}
        """What is to be answered from the ledger yet."""
        self._calls = 0
        """Number of calls that have begun."""
        self._answered = 0
        """Number of calls that are recorded in whole."""
        self._replay = threading.Lock()
        """For the two above: the program's thread takes recorded calls as well as this one."""
        self._generating: set[asyncio.Task[Any]] = set()
        """What the model is being asked."""
        self._conversation = Conversation(runner.chat, self._branch, parser)
        self._began: dict[int, str] = {}
        """By branch, the policy that has sampled its first token."""
        self._last: Reply | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.deadline = ProgramDeadline(runner.config.reward_timeout)
        self._skipped = False
        self._ended = False
        self._too_long: int | None = None
        """Tokens of the first conversation that left no room for an answer."""

    def _branch(self, branch: int) -> Tokens:
        """The tokens of a branch of the conversation."""
        return self.runner.ledger.branch(self.group.place, self.sample, branch)

    async def to_its_end(self, model: Model) -> None:
        """Run the program, and record its reward. `model`: what it asks, which asks this.

        Raises:
            EnvironmentFailed: it raised, stood still for too long, or returned no reward.
        """
        environment, timeout = self.runner.environment, self.runner.config.reward_timeout
        whose = f"environment {environment.name!r}: {self.about}"
        program = asyncio.ensure_future(environment.start(self.group.problem, model))
        try:
            async with self.deadline.timeout:
                self.deadline.restart()
                await asyncio.wait({program, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            found = program.result()
        except TimeoutError:
            blocked = ""
            if await environment.calls.blocked():
                blocked = (
                    "; the event loop that all its rollouts share is blocked: something there takes long "
                    "without await, such as time.sleep or a synchronous client. Give such calls to model.once"
                )
            raise EnvironmentFailed(
                f"{whose} has not gone on within {timeout:g} s (--orchestrator.reward-timeout allows more)"
                f"{blocked}"
            ) from None
        except Raised as raised:
            environment.calls.log_exception(whose, raised.error)
            if isinstance(raised.error, EnvironmentFailed):
                raise raised.error.of(whose) from raised.error
            raise failed(whose, raised.error) from raised.error
        finally:
            await self._end(program)
        if self._last is None:
            raise EnvironmentFailed(f"{whose} never asked the model, so nothing can be learned from it")
        if not self.rollout.versions and self._too_long is not None:
            raise PromptRefused(
                f"{whose} was never answered, so nothing can be learned from it: its first conversation has "
                f"{self._too_long} tokens, but prompt and answer together may have at most "
                f"{self.runner.servers.max_model_len} on the servers; raise the servers' --max-model-len (on "
                "rl, --inference.max-model-len), or remove the problem"
            )
        if says_nothing(found):
            raise Unscored(f"{whose} returned None, which means that there is nothing to say of it")
        reward = in_parts(found)
        if isinstance(reward, str):
            raise EnvironmentFailed(f"{whose} must return a finite reward, but {reward}: {shortened(found)}")
        await self.runner.pacing.turn()  # all of its turns are read again
        self._forget_from(0)  # it has made fewer calls than before
        self._finished(*reward)

    async def _end(self, program: "asyncio.Future[Any]") -> None:
        """Wait until nothing of the program runs any more."""
        self._ended = True
        self.deadline.end()
        program.cancel()
        for asked in self._generating:  # a program may end without waiting for all that it has asked
            asked.cancel()
        await asyncio.wait({program, *self._generating}, timeout=LAST_SECONDS)
        for future in (self._failure, program):
            if not future.done():
                future.cancel()
            elif not future.cancelled():
                future.exception()  # else asyncio would log that nobody has asked for it

    def _finished(self, reward: float, parts: dict[str, float]) -> None:
        assert self._last is not None
        rollout, ledger, place, chat = self.rollout, self.runner.ledger, self.group.place, self.runner.chat
        turns = ledger.turns(place, self.sample)
        cancelled = [turn.number for turn in turns if turn.finish_reason is None]
        if cancelled:
            ledger.forget_calls(place, self.sample, cancelled, rollout)
        rollout.take([turn for turn in turns if turn.finish_reason is not None])
        # As sampled: of a turn that was skipped, nobody knows what a stop string hid of it.
        rollout.text, rollout.finish_reason = chat.text(self._last.token_ids), self._last.finish_reason
        if (malformed := self._conversation.malformed_calls) is not None:
            parts = {**parts, MALFORMED_CALLS: float(malformed)}
        rollout.reward, rollout.parts, rollout.failed = reward, parts, None
        rollout.note_seconds()
        ledger.finish(place, self.sample, rollout, self._answered)

    # Calls

    def begin(self) -> int:
        """The number of a call that begins. The program's thread calls it, in the program's order."""
        self._check_going_on()
        number, self._calls = self._calls, self._calls + 1
        return number

    def _check_going_on(self) -> None:
        """Check that the run has not ended: what comes later must not touch what the ledger says of it.

        Raises:
            CancelledError: it has.
        """
        if self._ended:
            raise asyncio.CancelledError(f"{self.about} is over")

    def known_call(self, number: int, name: str) -> Call | None:
        """What the ledger has of call `number`, if it is one of that name; any thread may ask."""
        with self._replay:
            known = self._recorded.get(number)
            if not isinstance(known, Call) or known.name != name:
                return None
            del self._recorded[number]
            self._answered += 1
            return known

    async def skip_to(self, name: str) -> Call | None:
        """Answer `Model.skip_to`: take all recorded calls up to the one of that name."""
        with self._replay:
            found = next((c for c in self._recorded.values() if isinstance(c, Call) and c.name == name), None)
            if found is None or self._calls:
                return None
            skipped = [self._recorded.pop(n) for n in sorted(self._recorded) if n <= found.number]
            turns = [one for one in skipped if isinstance(one, Turn) and one.finish_reason is not None]
            self._answered += len(turns) + sum(isinstance(one, Call) for one in skipped)
            self._calls, self._skipped = found.number + 1, True
        for turn in turns[-1:]:
            text, end = self.runner.chat.text(turn.token_ids), turn.finish_reason or ""
            self._last = Reply(text, tuple(turn.token_ids), end, {}, 0)
        self.deadline.restart()
        return found

    def _known_turn(self, number: int, request: str) -> Turn | None:
        """The same of an answer of the model's, by the digest of what is asked."""
        with self._replay:
            known = self._recorded.get(number)
            if not isinstance(known, Turn) or known.request != request:
                return None
            del self._recorded[number]
            return known

    def _count_answered(self) -> None:
        with self._replay:
            self._answered += 1

    def _diverge_at(self, number: int) -> None:
        """Forget what is recorded from call `number` on, if anything is: the program asks something else."""
        if number in self._recorded:
            logger.warning("%s asks something else than before a restart at call %d", self.about, number)
            self._forget_from(number)

    def _forget_from(self, number: int) -> None:
        """Forget the recorded calls from `number` on that the program has not made again."""
        with self._replay:
            numbers = [later for later in self._recorded if later >= number]
            for later in numbers:
                del self._recorded[later]
        if numbers:
            self.rollout.diverged += 1
            self.runner.ledger.forget_calls(self.group.place, self.sample, numbers, self.rollout)

    async def generate(
        self,
        number: int,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        max_tokens: int | None,
        stop_token_ids: Sequence[int],
        stop: Sequence[str],
    ) -> Reply:
        """Answer `Model.generate`."""
        self._check_going_on()
        if self._skipped:
            raise RuntimeError("a rollout that has skipped its turns can't ask the model")
        task = asyncio.current_task()
        assert task is not None
        self._generating.add(task)
        task.add_done_callback(self._generating.discard)
        if tools and self.runner.config.tool_parser is None:
            self._give_up(no_tool_parser(self.runner.environment.name))
        with self.deadline:
            await self.runner.pacing.turn()
        context = self._conversation.next(messages, tools)
        longest = self._longest(context, max_tokens)
        stops = (*self.runner.chat.stop_token_ids, *stop_token_ids)
        strings = tuple(dict.fromkeys((*self.runner.config.sampling.stop, *stop)))
        request = request_digest(context, max_tokens, stops, strings)
        turn = self._known_turn(number, request)
        if turn is None:
            self._diverge_at(number)
            appended = array("i", context.appended.astype("i").tobytes())
            turn = Turn(number, request, context.branch, context.kept, appended)
        sampled = turn.finish_reason is None
        with self.deadline:
            try:
                watch = StopWatch(self.runner.chat, strings)
                watch.feed(turn.token_ids)
                while turn.finish_reason is None:
                    await self._sample(context, turn, longest, stops, watch)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                self._give_up(error)
            self._count_answered()
            if turn.began is not None:
                self._began.setdefault(turn.branch, turn.began)
            if sampled:
                await self.runner.pacing.turn()
        stopped = stopped_at_its_end(self.runner.chat, strings, turn.token_ids, turn.finish_reason)
        message = self._conversation.sampled(context, turn.token_ids, stopped)
        self._last = Reply(
            text=shown_text(self.runner.chat, turn.token_ids, stopped),
            token_ids=tuple(turn.token_ids),
            finish_reason=turn.finish_reason,
            message=message,
            prompt_tokens=len(context.token_ids),
            stop=None if stopped is None else stopped.string,
        )
        return self._last

    async def count_tokens(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> int:
        """Answer `Model.count_tokens`."""
        self._check_going_on()
        with self.deadline:
            await self.runner.pacing.turn()
        return len(self.runner.chat.prompt(messages, tools))

    def _give_up(self, error: BaseException) -> NoReturn:
        """Raise an error that ends the run, whatever the program makes of it."""
        if not self._failure.done():
            self._failure.set_exception(error)
        raise error

    def _longest(self, context: TokenContext, max_tokens: int | None) -> int:
        """Maximum tokens of an answer: what the program and the configuration allow, and the servers hold."""
        longest, limit = self.runner.config.sampling.max_tokens, self.runner.servers.max_model_len
        if max_tokens is not None:
            if max_tokens < 1:
                raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
            longest = min(longest, max_tokens)
        if limit is None:
            return longest
        return min(longest, max(limit - len(context.token_ids), 0))

    async def _sample(
        self, context: TokenContext, turn: Turn, longest: int, stops: Sequence[int], watch: StopWatch
    ) -> None:
        """Sample and record the next piece of a turn, whose tokens so far the watch has seen; none if the
        servers' context is full.

        Raises:
            PromptRefused: the servers refuse the request.
        """
        done, config = len(turn.token_ids), self.runner.config
        if done >= longest:
            if self._too_long is None and not done:
                self._too_long = len(context.token_ids)
            turn.finish_reason = "length"
        else:
            chunk, within = divmod(done, config.sampling.chunk)
            asked = min(config.sampling.chunk - within, longest - done)
            group = self.group
            seed = turn_seed(
                config.seed, group.place, group.policy_step, self.sample, turn.number, chunk, within
            )
            params = SamplingParams(
                max_tokens=asked,
                temperature=config.sampling.temperature,
                seed=seed,
                stop_token_ids=tuple(stops),
                stop=watch.strings,
                experts_from=self.runner.experts_from(
                    len(context.token_ids) + done if done else context.kept
                ),
            )
            prompt_ids = array("i", context.token_ids.tobytes())
            prompt_ids.extend(turn.token_ids)
            try:
                (piece,) = await self.runner.servers.generate(
                    prompt_ids,
                    params,
                    affinity=self.group.place,
                    versions=self.runner.versions,
                    began=self._began.get(turn.branch, turn.began),
                    sessions=(self.sample,),
                )
            except RequestRefused as error:
                raise PromptRefused(
                    f"environment {self.runner.environment.name!r}: {self.about}: {error}"
                ) from error
            self._check_going_on()
            piece, asked = watch.cut(piece, asked)
            turn.extend(piece, asked=asked, longest=longest)
            self.rollout.add_spans([(span.version, span.start, span.end) for span in piece.weight_versions])
        self.runner.ledger.record_turn(self.group.place, self.sample, turn)
        fault_point("orchestrator.turn")

    async def in_thread(self, call: Callable[[], Any], number: int | None = None) -> Any:
        """The result of a function that a program gives; `number`: the call that it will be recorded as."""
        self._check_going_on()
        if number is not None:
            self._diverge_at(number)
        try:
            return await self.runner.environment.answer(call, self.deadline)
        except Raised as raised:
            raise raised.error from None

    async def record(self, call: Call, snapshot: str | bytes | None) -> None:
        """Record an answer of the world."""
        self._check_going_on()
        self._diverge_at(call.number)
        self.runner.ledger.record_call(self.group.place, self.sample, call, snapshot)
        fault_point("orchestrator.call")
        self._count_answered()
        self.deadline.restart()

    async def newest_snapshot(self) -> Snapshot | None:
        """Answer `Model.snapshot`."""
        found = self.runner.ledger.newest_snapshot(self.group.place, self.sample)
        if found is None or found[0] in self._recorded:
            return None
        _, after, content = found
        return Snapshot(after, json.loads(content) if isinstance(content, str) else content)


def request_digest(
    context: TokenContext, max_tokens: int | None, stops: Sequence[int], strings: Sequence[str] = ()
) -> str:
    """A digest of what is asked: the tokens of the context, and how the answer ends."""
    digest = hashlib.blake2b(context.token_ids.astype("<i4", copy=False).data, digest_size=16)
    ends = [list(stops), list(strings)] if strings else [list(stops)]
    digest.update(json.dumps([context.branch, context.kept, max_tokens, *ends]).encode())
    return digest.hexdigest()
