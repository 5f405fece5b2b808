"""Evaluations: problems that policies of the run answer at an interval, and that are never trained on.

An evaluation of a policy has a ledger of its own below `evals/`, so that it goes on after a crash without
asking for an answer twice. Its result is a line of evals.jsonl; the ledger is removed then.
"""

import asyncio
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.checkpoint import eval_metrics
from cairn.config.environment import EvalConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.completers import make_completer
from cairn.orchestrator.environments import ask, make_environment
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun
from cairn.orchestrator.ledger.opening import remove
from cairn.orchestrator.rollout_log import KeptRollouts, rows_of
from cairn.orchestrator.rollouts import AnswerGroup
from cairn.orchestrator.servers import GeneratingServers
from cairn.orchestrator.state import OrchestratorState
from cairn.run.messages import PolicyName
from cairn.run.seeds import derive

logger = logging.getLogger(__name__)

NORMAL_95 = 1.96
"""Half the width of a normal distribution's 95 % interval, in standard deviations."""


class Evaluations:
    """The evaluations of a run's policies that its configuration asks for."""

    def __init__(self, state: OrchestratorState, chat: ChatFormat):
        """Make their environments.

        Raises:
            BadEnvironment: one can't be made.
        """
        self._state = state
        self._chat = chat
        self._all = [Evaluation(state.config, one) for one in state.config.eval]
        self._passed_over = set[int]()
        self._rate_steps()  # a process that was killed may not have

    def due(self, step: int, *, last: bool = False) -> bool:
        """Whether the policy of `step` is to be evaluated, and was not yet."""
        return bool(self._due(step, last))

    def _due(self, step: int, last: bool) -> "list[Evaluation]":
        asked = (one for one in self._all if last or step % one.config.interval == 0)
        return [one for one in asked if step not in self._passed_over and not self._is_done(one, step)]

    def pass_over(self, step: int) -> None:
        """The policy of `step` is never evaluated, because no server has it any more."""
        self._passed_over.add(step)

    def _is_done(self, evaluation: "Evaluation", step: int) -> bool:
        """Whether there is a result for this branch's policy of `step`."""
        wanted = about(evaluation.config.name, self._policy(step))
        return any(wanted.items() <= row.items() for row in self._state.run.evals.current())

    def _policy(self, step: int) -> PolicyName:
        return PolicyName(self._state.attempt.run_id, self._state.attempt.branch, step)

    async def run(self, step: int, *, last: bool = False) -> None:
        """Evaluate the policy of `step`, which the servers must serve until this returns.

        An environment that fails costs its evaluation, not the run.

        Raises:
            Exception: the servers' client gives up.
        """
        for one in self._due(step, last):
            name = one.config.name
            ledger = self._state.run.evaluations / f"{name}_step_{step}.sqlite"
            found = await one.run(self._policy(step), ledger, self._chat, self._state.servers)
            await asyncio.to_thread(self._keep, one, step, found)
            row = found.row
            self._state.run.evals.append(row)
            self._state.run.evals.make_durable()
            self._rate_steps()
            remove(ledger)
            numbers = {key: value for key, value in row.items() if isinstance(value, float)}
            self._state.evaluated.update(
                {f"eval/{name}/{key}": value for key, value in numbers.items()}
                | {f"eval/{name}/step": float(step)}
            )

    def _keep(self, evaluation: "Evaluation", step: int, found: "Evaluated") -> None:
        """Keep the answers, so that policies can be compared problem by problem; called in a thread."""
        config = evaluation.config
        kept = KeptRollouts(self._state.run.evaluated(config.name))
        rows = rows_of(step, found.groups, [config.environment.called], self._chat, trained=False)
        kept.write(step, rows, self._state.attempt, self._state.config.keep_rollouts_gb)
        kept.flush()

    def _rate_steps(self) -> None:
        """Tell retention of the results, if it may have to know them."""
        if self._state.config.ckpt is not None and (rows := self._state.run.evals.current()):
            eval_metrics.note(self._state.store.root, eval_metrics.ratings_of(rows))

    def close(self) -> None:
        """End the environments' threads once their calls have returned."""
        for one in self._all:
            one.environment.close()


def about(name: str, policy: PolicyName) -> dict[str, Any]:
    """What the result of an evaluation says of itself."""
    return {"step": policy.step, "name": name, "run_id": policy.run_id, "branch": policy.branch}


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation of a policy has come to.

    row: the result. groups: the problems with their answers; none if a problem has no usable prompt.
    """

    row: dict[str, Any]
    groups: list[AnswerGroup]


class Evaluation:
    """One evaluation, of any policy."""

    def __init__(self, config: OrchestratorConfig, evaluation: EvalConfig):
        """Make its environment.

        Its draws depend on the configuration's seed, the evaluation's name, and the step of the policy.

        Raises:
            BadEnvironment: it can't be made.
        """
        self.config = evaluation
        seed = derive(config.seed, "evaluation", evaluation.name)
        self._sampled = config.of_evaluation(evaluation).model_copy(update={"seed": seed})
        self.environment = ask(make_environment(evaluation.environment), self._sampled)

    def _ledger(self, policy: PolicyName, path: Path) -> Ledger:
        run = LedgerRun(
            run_id=policy.run_id,
            branch=policy.branch,
            format=FORMAT,
            seed=self._sampled.seed,
            problems=self.environment.problems,
            prompts_per_step=self.count,
            samples_per_prompt=self.config.samples,
            max_off_policy_steps=0,
        )
        return Ledger(path, run, None, policy.step)

    @property
    def count(self) -> int:
        """Number of problems that are asked."""
        return min(self.config.problems or self.environment.problems, self.environment.problems)

    async def run(
        self,
        policy: PolicyName,
        ledger: Path,
        chat: ChatFormat,
        servers: GeneratingServers,
        on_problem: Callable[[], None] = lambda: None,
    ) -> Evaluated:
        """Evaluate a policy, which the servers must serve, under its name, until this returns.

        Args:
            ledger: where all answers are recorded; what is there, and has not failed, is not asked for again.
            on_problem: called for each problem whose answers are complete.

        Raises:
            Exception: the servers' client gives up.
        """
        begun, groups = time.monotonic(), list[AnswerGroup]()
        name, step = self.config.name, policy.step
        logger.info("evaluation %s of step %d: %d problems", name, step, self.count)
        opened = self._ledger(policy, ledger)
        try:
            groups = await self._answered(opened, policy, chat, servers, on_problem)
            result = results(groups, self.config)
        finally:
            opened.close()
        if "error" in result:
            logger.warning("evaluation %s of step %d: %s", name, step, result["error"])
        if "reward" in result:
            logger.info("evaluation %s of step %d: reward %.4g", name, step, result["reward"])
        seconds = round(time.monotonic() - begun, 3)
        return Evaluated({**about(name, policy), **result, "seconds": seconds}, groups)

    async def _answered(
        self,
        ledger: Ledger,
        policy: PolicyName,
        chat: ChatFormat,
        servers: GeneratingServers,
        on_problem: Callable[[], None],
    ) -> list[AnswerGroup]:
        """All problems with their answers; what the ledger has is not asked for again."""
        completer = make_completer(
            self._sampled, self.environment, chat, servers, ledger, frozenset({str(policy)})
        )
        groups = {group.place: group for group in ledger.waiting()}
        for place in range(self.count):
            if place not in groups:
                groups[place] = AnswerGroup(place, place, policy.step, [], [])
                ledger.issue(groups[place])
        in_flight = self._sampled.max_in_flight or 256
        limit = asyncio.Semaphore(max(1, in_flight // self.config.samples))

        async def complete(group: AnswerGroup) -> AnswerGroup:
            if not group.rollouts or any(one.reward is None for one in group.rollouts):
                async with limit:
                    group = await completer.complete(group)
            on_problem()
            return group

        tasks = [asyncio.create_task(complete(groups[place])) for place in range(self.count)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


# The results of an evaluation


def results(groups: Sequence[AnswerGroup], config: EvalConfig) -> dict[str, Any]:
    """The result of an evaluation.

    Answers that failed have no reward and count nowhere but in `failed`.

    Returns:
        `problems`, `samples`: the number of problems with a rewarded answer, and of these answers. `failed`:
        answers without a reward, and `error`, why the first of them has none. `reward`: avg@k, the mean over
        problems of the mean reward of a problem's answers. `reward_ci95`: half the width of its 95 %
        confidence interval, from the spread between problems. `pass@K` for K = 1, 2, 4, ... up to the number
        of answers, and `pass@K_ci95`. `tokens`: mean length of an answer. `truncated`: the share of answers
        that were cut by the limit.
    """
    rewarded = [[one for one in group.rollouts if one.reward is not None] for group in groups]
    kept = [answers for answers in rewarded if answers]
    answers = list(itertools.chain.from_iterable(kept))
    found: dict[str, Any] = {
        "problems": len(kept),
        "samples": len(answers),
        "failed": sum(len(group.rollouts) for group in groups) - len(answers),
    }
    if failures := [one.failed for group in groups for one in group.rollouts if one.failed is not None]:
        found["error"] = failures[0]
    if not kept:
        return found
    rewards = [[one.reward for one in answers if one.reward is not None] for answers in kept]
    found |= _mean("reward", [statistics.fmean(one) for one in rewards])
    for k in _powers_of_two(config.samples):
        chances = [_pass(one, k, config.right_from) for one in rewards if len(one) >= k]
        if chances:
            found |= _mean(f"pass@{k}", chances)
    found["tokens"] = statistics.fmean(len(one.token_ids) for one in answers)
    found["truncated"] = statistics.fmean(float(one.finish_reason == "length") for one in answers)
    return found


def _powers_of_two(largest: int) -> Iterator[int]:
    k = 1
    while k <= largest:
        yield k
        k *= 2


def _pass(rewards: Sequence[float], k: int, right_from: float) -> float:
    """The chance that one of k answers, drawn without replacement, is right: unbiased for pass@k.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1.
    """
    n, right = len(rewards), sum(reward >= right_from for reward in rewards)
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean, and half the width of its 95 % confidence interval (normal; absent for a single value)."""
    found = {name: statistics.fmean(values)}
    if len(values) > 1:
        found[f"{name}_ci95"] = NORMAL_95 * statistics.stdev(values) / math.sqrt(len(values))
    return found
