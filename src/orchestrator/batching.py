"""Making batches: issues prompts to the servers and ships complete groups of answers to the trainer."""

import asyncio
import itertools
import logging
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cairn.config.teachers import TEACHER_LOGPROBS
from cairn.orchestrator.advantages import batch_samples, complete_experts, differ, teaches
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.completion import Completer
from cairn.orchestrator.environments import EnvironmentFailed
from cairn.orchestrator.environments.times import call_metrics
from cairn.orchestrator.ledger import RESTS, to_ranges
from cairn.orchestrator.metrics import advantage_metrics, batch_metrics, of_environment, rollout_counts
from cairn.orchestrator.policy_sync.gpu_turns import Sharing
from cairn.orchestrator.policy_sync.resume import Remade
from cairn.orchestrator.prompts.prompts import DifficultyFilter, Prompts
from cairn.orchestrator.prompts.sources import problems_of
from cairn.orchestrator.rollout_log import rows_of
from cairn.orchestrator.rollouts import AnswerGroup
from cairn.orchestrator.siblings import Siblings
from cairn.orchestrator.state import OrchestratorState
from cairn.orchestrator.teachers import ServedTeachers
from cairn.run.batches import RLBatch, Sample, Sampling, batch_path, digest_of, write_batch
from cairn.run.faults import fault_point
from cairn.run.messages import BatchHeader, PolicyName, ShippedBatch

logger = logging.getLogger(__name__)

NO_SPREAD = "all answers have the same reward"
"""Why a prompt is replaced by another one: advantages compare its answers, and none is better."""
ALL_MASKED = "all answers are cut off"
"""The same, where nothing is learned from such answers."""


class BatchMaker:
    """Keeps the servers busy, and ships a batch as soon as enough groups are complete."""

    def __init__(
        self,
        state: OrchestratorState,
        completers: Sequence[Completer[Any]],
        sharing: Sharing,
        chat: ChatFormat,
        teachers: ServedTeachers,
    ):
        """Take over the ledger's waiting prompts; answers sampled at another temperature are dropped.

        `completers`: of each environment, in order.
        """
        self.state = state
        self.completers = completers
        self.sharing = sharing
        self.chat = chat
        self.teachers = teachers
        temperature = state.config.sampling.temperature
        dropped = state.ledger.sample_at(temperature, state.shipped.newest.step + 1)
        self._dropped = Counter(group.environment for group in dropped)
        """Prompts of each environment that were dropped since the last batch; `_failed`, `_redrawn` and
        `_filtered` likewise."""
        self._failed = Counter[int]()
        self._unscored = Counter[int]()
        """Of those that failed, the prompts of whose answers the environment has nothing to say."""
        self._retried = Counter[int]()
        """How often an environment's calls were tried again, between the last two batches."""
        self._redrawn = Counter[int]()
        for reason in (NO_SPREAD, ALL_MASKED):
            self._redrawn += state.ledger.given_up(reason, state.shipped.newest.step + 1)
        self._filtered = state.ledger.given_up(RESTS, state.shipped.newest.step + 1)
        self._given_up: list[AnswerGroup] = []
        if dropped:
            logger.warning(
                "%d prompts are sampled again: their answers come from another temperature", len(dropped)
            )
        self.filter = DifficultyFilter(state.ledger, [source.config.pools for source in state.sources])
        self.prompts = Prompts(state.ledger, self.filter)
        self.remade = Remade(state, self.prompts.ready)
        self.siblings = Siblings(state.config, state.run, state.ledger)

    async def run(self) -> None:
        """Make batches until cancelled.

        Raises:
            EnvironmentFailed: nothing can be learned from several prompts in a row.
            AdvantageFailed: the advantage fails on a group.
            ServerUnavailable: a served teacher does not answer in time.
            UsageError: a batch that is made again is not the one that was shipped.
            Exception: the servers' client gives up.
        """
        while True:
            self.state.policy.changed.clear()
            self.prompts.collect()
            self._give_up()
            self._redraw()
            while (groups := self._next_batch()) is not None:
                await self._ship(self.state.shipped.newest.step + 1, groups)
                self._redraw()
            await self.sharing.hand_over()
            self._issue()
            await self.state.policy.changed.wait()

    def _give_up(self) -> None:
        """Give up prompts too many of whose answers have failed.

        Raises:
            EnvironmentFailed: that happened to `max_failed_prompts` prompts of one environment in a row.
        """
        most = self.state.config.max_failed_prompts
        for environment, source in enumerate(self.state.sources):
            failed = [group for group in self.prompts.failed if group.environment == environment]
            if len(failed) >= most:
                last = failed[-1]
                raise EnvironmentFailed(
                    f"environment {source.label!r} fails: nothing can be learned from "
                    f"{len(failed)} {'of its ' if len(self.state.sources) > 1 else ''}prompts in a row "
                    "(--orchestrator.max-failed-prompts allows more). "
                    f"The last one, problem {last.problem}: {last.failure}. {self._what_to_do()}"
                )
        given_up = self.prompts.give_up(self.state.shipped.newest.step + 1)
        if given_up:
            self._given_up += given_up
            self._failed.update(group.environment for group in given_up)
            self._unscored.update(group.environment for group in given_up if group.unscored)
            logger.warning("%d prompts are given up: too many of their answers have failed", len(given_up))

    def _what_to_do(self) -> str:
        """What the user can do about an environment that fails."""
        if self.state.config.ckpt is None:
            return "Mend the environment and start the run again; without --ckpt, nothing of it was saved"
        return "What was sampled is kept: mend the environment and resume with --ckpt.resume auto"

    def _redraw(self) -> None:
        """Leave out prompts from whose answers nothing can be learned; others are issued for them.

        Source: dynamic sampling of DAPO, arXiv:2503.14476, section 3.2; here with a bound.
        """
        config, step = self.state.config, self.state.shipped.newest.step + 1
        if config.max_off_policy_steps == 0 and (self.prompts.answering or self.prompts.partial):
            return  # which prompts are left out must not depend on the order in which answers arrive
        for place in sorted(self.prompts.ready):
            if self._redrawn.total() >= config.redraw:
                break
            if reason := self._teaches_nothing(self.prompts.ready[place]):
                group = self.prompts.leave_out(place, reason, step)
                self._given_up.append(group)
                self._redrawn[group.environment] += 1

    def _teaches_nothing(self, group: AnswerGroup) -> str | None:
        """Why nothing can be learned from the group; None if something can."""
        source = self.state.source(group)
        overlong = source.overlong
        has_teacher = TEACHER_LOGPROBS in source.config.teachers
        if not (has_teacher or teaches(source.advantage, overlong.compared(group.learned))):
            return NO_SPREAD
        return ALL_MASKED if all(map(overlong.masks, group.learned.rollouts)) else None

    def _teaches(self, group: AnswerGroup) -> bool:
        """Whether anything can be learned from the group."""
        return self._teaches_nothing(group) is None

    def _differ(self, group: AnswerGroup) -> bool:
        """Whether the answers of a group without failed ones differ in what they are compared by."""
        source = self.state.source(group)
        return differ(source.advantage, source.overlong.compared(group))

    def _issue(self) -> None:
        """Issue as many prompts as can still be used before their answers become too old."""
        config, policy, prompts = self.state.config, self.state.policy, self.prompts
        served = policy.step
        if served is None:
            return
        horizon = min(served + 1 + config.max_off_policy_steps, config.max_steps)
        following = self.state.shipped.newest.step + 1
        wanted = (horizon + 1 - following) * config.prompts_per_step
        assert config.max_in_flight is not None, "the configuration is settled"
        in_flight = sum(self._answers(group) for _, group in prompts.answering.values())
        while True:
            # After a restart the trainer has yet to recompute the newest policies that partial groups come
            # from.
            group = next((group for group in prompts.partial if group.policy_step <= served), None)
            if group is None and len(prompts) >= wanted:
                return
            environment = (group or prompts.next(served).group).environment
            in_flight += self.state.sources[environment].config.samples_per_prompt
            if in_flight > config.max_in_flight and prompts.answering:
                return
            if group is None:
                self._filtered.update(one.environment for one in prompts.next(served).skipped)
                group = prompts.issue(served, following)
                self.siblings.answer(group, following + len(prompts) // config.prompts_per_step)
            else:
                prompts.partial.remove(group)
            task = asyncio.create_task(self.completers[group.environment].complete(group))
            task.add_done_callback(lambda _: policy.changed.set())
            prompts.answering[group.place] = task, group

    def _answers(self, group: AnswerGroup) -> int:
        """Number of answers to a group's prompt."""
        return self.state.source(group).config.samples_per_prompt

    def _next_batch(self) -> list[AnswerGroup] | None:
        """The oldest ready groups, if there are enough for a batch; drops groups that are too old."""
        config = self.state.config
        step, size = self.state.shipped.newest.step + 1, config.prompts_per_step
        for group in self.prompts.older_than(step - 1 - config.max_off_policy_steps):
            self.remade.forget(group.place)
            self.state.ledger.drop(group.place, "stale", step)
            self.prompts.drop(group.place)
            self._dropped[group.environment] += 1
        if len(self.prompts.ready) < size:
            return None
        by_age = sorted(self.prompts.ready.values(), key=lambda group: (group.oldest_step, group.place))
        chosen = by_age[:size]
        for group in chosen:
            del self.prompts.ready[group.place]
        return sorted(chosen, key=lambda group: group.place)

    async def _ship(self, step: int, groups: list[AnswerGroup]) -> None:
        """Have servers score the batch of `step`, write its file, then record the batch in the ledger."""
        state = self.state
        state.ledger.stay_in_place()
        by_group, of_experts = await state.disk.do(self._to_train_on, groups)
        self._retried = Counter({i: one.retrying.take() for i, one in enumerate(self.completers)})
        flat = list(itertools.chain.from_iterable(by_group))
        await self.teachers.score(flat)
        digest = await state.disk.do(digest_of, flat)
        batch = self._batch(step, groups, by_group, digest)
        batch.metrics |= of_experts
        self.remade.check(batch.header.ledger)
        fault_point("orchestrator.before_ship")
        await state.disk.do(self._write, step, groups, batch)
        fault_point("orchestrator.shipped")
        state.ledger.ship(batch.header.ledger, {group.place: group.problem for group in groups})
        state.shipped.add(batch.header.ledger)
        self.remade.shipped(step)
        self._dropped, self._failed, self._redrawn, self._filtered = (Counter[int]() for _ in range(4))
        self._unscored = Counter[int]()
        self._given_up = []
        logger.info("batch %d: reward %.3f", step, batch.metrics["reward/mean"])

    def _write(self, step: int, groups: list[AnswerGroup], batch: RLBatch) -> None:
        """Write the rollouts of `step`, then its batch; called in a thread."""
        state = self.state
        if state.config.keep_rollouts_gb:
            labels = [source.label for source in state.sources]
            rows = rows_of(step, groups, labels, self.chat)
            rows += rows_of(step, self._given_up, labels, self.chat, trained=False)
            state.rollouts.write(step, rows, state.attempt, state.config.keep_rollouts_gb)
        fault_point("orchestrator.kept_rollouts")
        write_batch(batch_path(state.run.batches, step), batch)

    def _batch(
        self, step: int, groups: list[AnswerGroup], by_group: list[list[Sample]], digest: str
    ) -> RLBatch:
        """The batch of `step`: samples, whose content has this digest, header and metrics."""
        attempt = self.state.attempt
        learned = [group.learned for group in groups]
        samples = list(itertools.chain.from_iterable(by_group))
        sampling = Sampling(self.state.config.sampling.temperature)
        row = ShippedBatch(
            step=step,
            places=to_ranges(group.place for group in groups),
            samples=len(samples),
            tokens=sum(len(sample.token_ids) for sample in samples),
            digest=digest,
            oldest_step=min(group.oldest_step for group in learned),
        )
        progress = self.state.shipped.newest.after(row)
        versions = {version for group in learned if group.shared is None for version in group.versions}
        served = attempt.version(max(group.policy_step for group in learned))
        return RLBatch(
            samples,
            {
                "groups": len(groups),
                **batch_metrics(learned, step, self._differ, self._teaches),
                **advantage_metrics(samples),
                **rollout_counts(groups),
                **self._shared(groups),
                **self._overlong(groups),
                **{name: counts.total() for name, counts in self._counts().items()},
                **self._of_environments(groups, by_group, step),
                **self._of_pools(step),
                **self._of_tokens(groups, step),
                "epoch": progress.total_problems / problems_of(self.state.sources),
                "total_problems": progress.total_problems,
                **call_metrics(source.environment.times.take() for source in self.state.sources),
                **self.state.servers.take_metrics(),
                **self.state.take_evaluated(),
            },
            sampling=sampling,
            header=BatchHeader(
                run_id=attempt.run_id,
                branch=attempt.branch,
                attempt=attempt.id,
                step=step,
                version=max(versions, key=lambda one: PolicyName.parse(one).step, default=served),
                problems=[group.problem for group in groups],
                ledger=row,
            ),
        )

    def _to_train_on(self, groups: list[AnswerGroup]) -> tuple[list[list[Sample]], dict[str, float]]:
        """The training samples of each group of a batch, and metrics of their experts; called in a thread.

        The experts of an answer of 8192 tokens through 48 layers are 3 MB in the ledger and 6 MB in a sample,
        which take tens of milliseconds.
        """
        replays = self.state.config.router_replay
        if replays:
            self.state.ledger.take_experts(groups)
        by_group = self._samples([group.learned for group in groups])
        flat = list(itertools.chain.from_iterable(by_group))
        return by_group, {"experts/known": complete_experts(flat)} if replays else {}

    def _samples(self, groups: list[AnswerGroup]) -> list[list[Sample]]:
        """The training samples of each group of a batch, none of whose answers has failed.

        Advantages that look at a whole batch look at each environment's groups of it.
        """
        found: list[list[Sample]] = [[] for _ in groups]
        for number, source in enumerate(self.state.sources):
            own = [i for i, group in enumerate(groups) if group.environment == number]
            compared = [source.overlong.compared(groups[i]) for i in own]
            made = batch_samples(compared, source.advantage, source.overlong.masks)
            for i, samples in zip(own, made, strict=True):
                found[i] = samples
        return found

    def _counts(self) -> dict[str, Counter[int]]:
        """What became of prompts that are in no batch since the last one, and what was tried again, by
        environment."""
        return {
            "groups/failed": self._failed,
            "groups/unscored": self._unscored,
            "groups/dropped": self._dropped,
            "groups/redrawn": self._redrawn,
            "rollouts/retried": self._retried,
        }

    def _of_pools(self, step: int) -> dict[str, float]:
        """What the difficulty filter skips while the batch of `step` is made, in all and by environment."""
        found = Counter[str]()
        for number, source in enumerate(self.state.sources):
            sizes = self.filter.sizes(number, step - 1)
            if not sizes:
                continue
            own = {f"pool/{name}": size for name, size in sizes.items()}
            own["groups/resting"] = self._filtered[number]
            found.update(own)
            if len(self.state.sources) > 1:
                found.update({f"env/{source.label}/{name}": value for name, value in own.items()})
        return dict(found)

    def _of_tokens(self, groups: list[AnswerGroup], step: int) -> dict[str, float]:
        """What became of tokens that were sampled since the last batch and teach nothing, and how many wait.

        Args:
            groups: of the batch of `step`.
        """
        thrown = self.state.ledger.thrown(step)
        found = {
            "tokens/unlearned": 0,
            "tokens/failed": thrown.get("failed", 0),
            "tokens/redrawn": thrown.get("redrawn", 0),
            "tokens/dropped": thrown.get("dropped", 0),
        }
        for group in groups:
            masks, teaches = self.state.source(group).overlong.masks, self._teaches(group)
            for one in group.rollouts:
                if one.failed is not None:
                    found["tokens/failed"] += one.sampled
                elif not teaches or masks(one):
                    found["tokens/unlearned"] += one.sampled
        return {**found, "tokens/waiting": sum(group.sampled for group in self.prompts.waiting)}

    def _shared(self, groups: list[AnswerGroup]) -> dict[str, float]:
        """How many answers other branches have sampled, in a run that has such."""
        if not self.state.config.siblings:
            return {}
        return {"rollouts/shared": sum(len(one.rollouts) for one in groups if one.shared is not None)}

    def _overlong(self, groups: list[AnswerGroup]) -> dict[str, float]:
        """What became of answers that are too long, where that differs from others."""
        kinds = {self.state.source(group).config.overlong.type for group in groups}
        found: dict[str, float] = {}
        if "mask" in kinds:
            found["rollouts/masked"] = sum(
                self.state.source(group).overlong.masks(rollout)
                for group in groups
                for rollout in group.learned.rollouts
            )
        if "shape" in kinds:
            compared = (self.state.source(group).overlong.compared(group.learned) for group in groups)
            found["reward/compared/mean"] = statistics.fmean(
                itertools.chain.from_iterable(group.rewards for group in compared)
            )
        return found

    def _of_environments(
        self, groups: list[AnswerGroup], samples: list[list[Sample]], step: int
    ) -> dict[str, float]:
        """The metrics of each environment in the batch of `step`, if there are several.

        Args:
            samples: of each group.
        """
        sources, order = self.state.sources, self.state.ledger.run.order
        if len(sources) == 1:
            return {}
        found: dict[str, float] = {}
        for number, source in enumerate(sources):
            own = [group for group in groups if group.environment == number]
            about = of_environment(own, step, self._differ, self._teaches)
            of_own = zip(groups, samples, strict=True)
            about |= advantage_metrics(
                sample for group, found in of_own if group.environment == number for sample in found
            )
            about |= self._overlong(own) if own else {}
            about |= {name: counts[number] for name, counts in self._counts().items()}
            if own:
                about["epoch"] = order.at(max(group.place for group in own)).epoch
            found |= {f"env/{source.label}/{name}": value for name, value in about.items()}
        return found
