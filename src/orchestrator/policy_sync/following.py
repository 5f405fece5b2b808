"""Follows the trainer: takes each policy that it announces to the servers and into checkpoints."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from cairn.orchestrator.evaluation import Evaluations
from cairn.orchestrator.policy_sync.gpu_turns import Sharing
from cairn.orchestrator.policy_sync.resume import save_part
from cairn.orchestrator.state import OrchestratorState
from cairn.policy.errors import ServerDisagrees, WeightsAltered, WeightsGone
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.exits import PolicyAltered
from cairn.run.faults import fault_point
from cairn.run.files import read_json
from cairn.run.messages import Announcement, Attempt, Probe, read_probe
from cairn.run.waiting import POLL_SECONDS, DeadlinePassed, Patience

# Explains from config.json why trainer and servers may compute different logprobs.


SUSPECTS = (
    (("quantization_config",), "its weights are quantized", "start from a model that is not"),
    (
        ("attn_logit_softcapping", "final_logit_softcapping"),
        "it caps attention scores or logits (softcapping)",
        "vLLM's attention backend must implement that too (choose another with --inference.vllm-args)",
    ),
    (
        ("num_experts", "num_local_experts", "n_routed_experts"),
        "it is a mixture of experts",
        "rounding may route tokens to other experts: compute in float32 on both sides",
    ),
    (
        ("sliding_window", "layer_types"),
        "it mixes kinds of layers or has sliding-window attention",
        "see docs/reference/models.md for what works",
    ),
    (
        ("rope_scaling", "rope_parameters"),
        "it has its own rotary parameters",
        "the server's vLLM and the trainer's transformers must interpret them alike",
    ),
)
"""Settings in config.json that trainer and servers may implement differently: keys, meaning, remedy."""


@contextlib.contextmanager
def explained(model: Path) -> Iterator[None]:
    """Turn a disagreement at the start of a run into a usage error that names suspicious model settings.

    Raises:
        UsageError: in place of ServerDisagrees.
        WeightsAltered: passed on unchanged, because damage on the way is not the model's fault.
    """
    try:
        yield
    except WeightsAltered:
        raise
    except ServerDisagrees as error:
        raise UsageError(
            f"the servers and the trainer do not compute the same model: {error}. {_blame(model)} "
            "--no-self-check skips this check, and the run would then learn from wrong logprobs"
        ) from error


def _blame(model: Path) -> str:
    config: dict[str, Any] = read_json(model / "config.json", dict[str, Any]) or {}
    settings = {**config, **(config.get("text_config") or {})}
    found = [
        f"{what} ({', '.join(name for name in names if settings.get(name))}): {remedy}."
        for names, what, remedy in SUSPECTS
        if any(settings.get(name) for name in names)
    ]
    found.append(
        "Trainer and server compute in their own data types: the difference is smallest with "
        "--trainer.precision.compute and --inference.dtype set alike."
    )
    return f"About {model} ({settings.get('model_type', 'unknown')}): " + " ".join(found)


logger = logging.getLogger(__name__)

T = TypeVar("T")

LAST_PUSH = 30
"""Seconds that the servers get to load the final policy, if it is not evaluated."""


class AttemptOver(Exception):
    """A newer attempt of the run has begun; this orchestrator belongs to the earlier one and must join it."""


class TrainerFollower:
    """Saves and serves each policy that the trainer announces."""

    def __init__(
        self, state: OrchestratorState, first_policy: Path, sharing: Sharing, evaluations: Evaluations
    ):
        """Prepare to follow.

        Args:
            first_policy: the Hugging Face directory of the policy that the attempt starts from.
        """
        self.state = state
        self.first_policy = first_policy
        self.sharing = sharing
        self.evaluations = evaluations
        self._first_push = True
        """No policy that this attempt's trainer has published is known to be served yet."""

    async def run(self) -> int:
        """Follow the trainer until it announces the last policy. Returns the last step.

        Raises:
            DeadlinePassed: the trainer announced no policy in time.
            AttemptOver: another attempt of the run has begun.
        """
        state = self.state
        announced = state.run.versions.all_announced(state.attempt)
        step = announced[0] - 1 if announced else state.attempt.start_step
        self._first_push = step <= state.attempt.start_step  # announcements before one that is served go
        async with self.sharing.serving:
            first = step == state.attempt.start_step and self.evaluations.due(step)
            if (first or not announced) and self.sharing.wants(step):
                await self._unless_ended(self._serve_first(step), step)
                await self._evaluate(step)
        while True:
            newest = following = await self._announcement(step + 1)
            while following is not None:  # when behind: serve only the newest, but save each
                newest = following
                if newest.save:
                    await save_part(state, newest.version)
                if self.evaluations.due(newest.version):
                    break
                following = self._announced(newest.version + 1)
            step, is_new = newest.version, newest.version > step
            state.shipped.forget_before(step)
            state.ledger.fold(state.store.latest() or 0, spared=state.config.spared_batches)
            if newest.last:  # nothing is sampled from it, so a server may fail
                if is_new:
                    async with self.sharing.serving:
                        await self._serve_last(step)
                        await self.sharing.sleep_at_end()
                self.sharing.end()
                return step
            async with self.sharing.serving:
                if self.sharing.wants(step):
                    await self._unless_ended(self._serve_announced(step), step)
                    await self._evaluate(step)
                else:
                    state.run.versions.forget_before(step)

    async def _unless_ended(self, serve: Coroutine[Any, Any, None], step: int) -> None:
        """Serve the policy after `step` steps, until the trainer ends the run there."""
        serving = asyncio.create_task(serve)
        try:
            while not serving.done() and self._end_at(step) is None:
                await asyncio.wait([serving], timeout=10 * POLL_SECONDS)
            if serving.done():
                serving.result()
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _serve_last(self, step: int) -> None:
        """Serve the last policy, for clients and evaluations; the run is whole without either.

        A run that was asked to stop ends at once: that policy is not the last one, unless nobody resumes it.
        """
        due = self.state.run.stop_requested() is None and self.evaluations.due(step, last=True)
        if not due and not self.sharing.wants(step, last=True):
            return
        seconds = self.state.config.request_timeout if due else LAST_PUSH
        try:
            await asyncio.wait_for(self._serve_announced(step), seconds)
            if due:
                await self.evaluations.run(step, last=True)
        except Exception as error:
            if due and self.evaluations.due(step, last=True):
                logger.warning("the last policy is not evaluated: %s", error)

    async def _evaluate(self, step: int) -> None:
        """Have the policy of `step` evaluated, if that is due and it is served.

        The trainer goes on meanwhile, as far as it has batches: its checkpoints are saved, its policies wait.
        """
        if self.state.policy.step != step:
            self.evaluations.pass_over(step)
            self.state.policy.changed.set()  # whoever waits for its evaluation goes on
        if not self.evaluations.due(step):
            return
        evaluating, seen = asyncio.create_task(self.evaluations.run(step)), step
        try:
            while not evaluating.done():
                if (announced := self._announced(seen + 1)) is None:
                    await asyncio.wait([evaluating], timeout=10 * POLL_SECONDS)
                    continue
                seen = announced.version
                if announced.save:
                    await save_part(self.state, seen)
            evaluating.result()
        finally:
            evaluating.cancel()
            await asyncio.gather(evaluating, return_exceptions=True)

    async def _announcement(self, step: int) -> Announcement:
        """The trainer's announcement of policy `step`, or that the run ends with the one before.

        Its deadline runs only while the trainer has the batch.
        """
        timeout = self.state.config.version_timeout
        return await self._wait(
            lambda: self._announced(step) or self._end_at(step - 1),
            runs=lambda: self.state.shipped.newest.step >= step,
            problem=f"waited {timeout:g} s for the trainer's policy version {step}; "
            "--orchestrator.version-timeout allows more",
        )

    def _announced(self, step: int) -> Announcement | None:
        """The announcement of policy `step`, if any; it can exist before its batch is noted as shipped."""
        if step > self.state.shipped.newest.step:
            return None
        return self.state.run.versions.announced(self.state.attempt, step)

    def _end_at(self, step: int) -> Announcement | None:
        """The announcement of version `step`, if the run ends there."""
        found = self._announced(step)
        return found if found and found.last else None

    async def _beginning(self, step: int) -> tuple[Path, Probe | None]:
        """Where servers get the policy that the attempt starts from, and the trainer's probe of it."""
        timeout, versions = self.state.config.version_timeout, self.state.run.versions
        begun = await self._wait(
            lambda: versions.beginning(self.state.attempt),
            runs=lambda: True,
            problem=f"waited {timeout:g} s for the trainer to load policy {step} and to score its probe; "
            "--orchestrator.version-timeout allows more",
        )
        probe = read_probe(versions.folder(step)) if self.state.config.self_check else None
        if probe is None and self.state.config.self_check:
            raise UsageError(
                "the trainer was given --no-self-check, so it has no probe to check servers by: give the "
                "orchestrator --no-self-check as well"
            )
        return versions.folder(step) if begun.published else self.first_policy, probe

    async def _wait(self, look: Callable[[], T | None], *, runs: Callable[[], bool], problem: str) -> T:
        """Poll `look` until it returns something, and return that.

        Args:
            runs: whether the trainer's deadline is running at the moment.

        Raises:
            DeadlinePassed: the deadline has passed; the message is `problem`.
            AttemptOver: another attempt of the run has begun.
        """
        patience, checked = None, time.monotonic()
        while (found := look()) is None:
            if not runs():
                patience = None
            elif patience is None:
                patience = Patience(self.state.config.version_timeout)
            elif patience.over:
                raise DeadlinePassed(problem)
            if time.monotonic() - checked > 1:
                checked = time.monotonic()
                check_attempt(self.state.run, self.state.attempt)
            await asyncio.sleep(POLL_SECONDS)
        return found

    async def _serve_first(self, step: int) -> None:
        """Serve the policy that the attempt starts from; with the self-check, the servers must reproduce a
        probe.

        From a checkpoint, the policy is served once the trainer has read and verified every byte of it, and
        has perhaps published it in another data type, or as an adapter, as in a new run whose servers take
        only adapters. In other new runs the servers start at once; their answers are used once they have
        reproduced the probe.
        """
        with explained(self.first_policy) if self.state.config.self_check else contextlib.nullcontext():
            if self.state.attempt.resume_from or self.state.attempt.publishes_first:
                folder, probe = await self._beginning(step)
                await self._serve(folder, step, probe=probe)
            elif not self.state.config.self_check:
                await self._serve(self.first_policy, step)
            else:
                await self._serve(self.first_policy, step, probe_follows=True)
                _, probe = await self._beginning(step)
                assert probe is not None
                await self.state.servers.prove(probe)

    async def _serve_announced(self, step: int) -> None:
        """Serve a policy that the trainer has published.

        Raises:
            PolicyAltered: no server has got what the trainer wrote, however often it was tried.
        """
        folder = self.state.run.versions.folder(step)
        probe = read_probe(folder) if self.state.config.self_check else None
        try:
            with explained(self.first_policy) if self._first_push else contextlib.nullcontext():
                if await self._serve(folder, step, probe=probe):
                    self._first_push = False
        except WeightsAltered as error:
            raise PolicyAltered(
                f"the policy of step {step} is not as the trainer wrote it: {error}"
            ) from error

    async def _serve(
        self, folder: Path, step: int, *, probe: Probe | None = None, probe_follows: bool = False
    ) -> bool:
        """Have every server load the policy after `step` steps; prompts are sampled from it from then on.

        Returns whether servers have it: the trainer may have withdrawn it for a newer one.
        """
        fault_point("orchestrator.before_push")
        state = self.state
        version = state.attempt.version(step)
        self.sharing.before_serving()
        if state.config.max_off_policy_steps == 0:
            state.policy.versions.clear()
        state.policy.versions.add(version)
        try:
            await state.servers.serve(str(folder), version, probe=probe, probe_follows=probe_follows)
        except WeightsGone:
            logger.info("version %s is gone, because the trainer is making the next one", version)
            return False
        state.run.versions.forget_before(step)
        state.policy.step = step
        state.policy.changed.set()
        logger.info("version %s is served", version)
        return True


def check_attempt(run: RunDirectory, attempt: Attempt) -> None:
    """Check that no other attempt of the run has begun.

    Raises:
        AttemptOver: another attempt has begun.
    """
    current = run.attempt()
    if current and current.id != attempt.id:
        raise AttemptOver(f"attempt {attempt.id} is over: attempt {current.id} has begun")
