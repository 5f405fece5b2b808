"""The orchestrator: prompts, rollouts, rewards, batches, and the policy's way to the servers.

Two things go on at once. One follows the trainer: each policy version that it announces is put into the
servers, while they generate. The other keeps prompts with the servers and ships a batch as soon as enough
answers are there. `max_off_policy_steps` bounds how far they come apart; at 0 they take turns.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.step import LEDGER, ORCHESTRATOR_STATE, OrchestratorRecord, StepFolder
from cairn.checkpoint.store import CheckpointStore
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.advantages import make_advantage, to_samples
from cairn.orchestrator.disagreement import explained
from cairn.orchestrator.environments import SingleTurn, make_environment
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerFailed, LedgerRun, to_ranges
from cairn.orchestrator.metrics import batch_metrics
from cairn.orchestrator.prompts import Prompts
from cairn.orchestrator.rollouts import AnswerGroup, AttemptOver
from cairn.orchestrator.sampling import Sampler
from cairn.orchestrator.servers import PolicyServers
from cairn.policy.errors import WeightsGone
from cairn.run.batches import Batch, RLBatch, Sampling, batch_path, write_batch
from cairn.run.directory import Attempt, RunDirectory
from cairn.run.faults import fault_point
from cairn.run.files import read_json
from cairn.run.messages import Announcement, BatchHeader, PolicyName, Probe, ShippedBatch, read_probe
from cairn.run.recipe import template_arguments
from cairn.run.waiting import POLL_SECONDS, DeadlinePassed, Patience

logger = logging.getLogger(__name__)

LAST_PUSH = 30  # seconds for the servers to take the final policy


@dataclass
class Progress:
    """How far the orchestrator has come: steps shipped, and what was in their batches."""

    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0
    total_problems: int = 0

    def after(self, batch: ShippedBatch) -> "Progress":
        """Where the next batch leads."""
        return Progress(
            batch.step,
            self.total_tokens + batch.tokens,
            self.total_samples + batch.samples,
            self.total_problems + batch.problems,
        )


class Orchestrator:
    """Ships one batch a step, sampled from policies at most `max_off_policy_steps` older than the newest."""

    def __init__(self, config: OrchestratorConfig, attempt: Attempt, servers: PolicyServers):
        """Take up the run where `attempt` starts, and where the ledger says that it has got to since.

        Args:
            config: its `model.name` is the local directory of the policy to start from, unless the attempt
                resumes.
            servers: the inference servers.

        Raises:
            BadEnvironment: the environment can't be made.
            BadExtension: the advantage can't be made.
            CheckpointError: the checkpoint's ledger can't be read.
        """
        self.config = config
        self.attempt = attempt
        self.servers = servers
        self.run_directory = RunDirectory(config.output_dir, config.ckpt and config.ckpt.dir)
        self.store = CheckpointStore(self.run_directory.checkpoints)
        self.advantage = make_advantage(config.advantage)
        self.environment = SingleTurn(make_environment(config.environment), config)
        resume_from = Path(attempt.resume_from) if attempt.resume_from else None
        self.policy_folder = StepFolder(resume_from).model if resume_from else Path(config.model.name)
        self.ledger = Ledger(
            self.run_directory.ledger,
            self._whose_ledger(),
            resume_from and StepFolder(resume_from).ledger,
            attempt.start_step,
        )
        recipe = read_json(self.run_directory.recipe) or {}
        self.recipe = recipe.get("orchestrator", {})
        if recipe.get("prompts_again") and self.ledger.begun:  # who waits was asked by another recipe
            for group in self.ledger.waiting():
                self.ledger.drop(group.place, "recipe", attempt.start_step + 1)
        self.versions: set[str] = set()
        """Names of the policies that tokens may come from now."""
        self.policy_step: int | None = None
        """Of the policy that the servers have, once they have one."""
        self.sampler = Sampler(
            config, self.environment, self.policy_folder, servers, self.ledger, self.versions
        )
        self.sampler.template_arguments = template_arguments(self.recipe)
        self.progress = self._resume(resume_from)
        """After each step whose batch is shipped, from the newest that the trainer has announced on."""
        self.shipped = max(self.progress)
        self._dropped = self.ledger.sample_at(config.sampling.temperature, self.shipped + 1)
        if self._dropped:
            logger.warning(
                "%d prompts are asked again: their answers were sampled at another temperature", self._dropped
            )
        self._prompts = Prompts(self.ledger)
        self._changed = asyncio.Event()
        self._disk = ThreadPoolExecutor(1)

    def _whose_ledger(self) -> LedgerRun:
        config, attempt = self.config, self.attempt
        return LedgerRun(
            run_id=attempt.run_id,
            branch=attempt.branch,
            format=FORMAT,
            seed=config.seed,
            problems=self.environment.problems,
            prompts_per_step=config.prompts_per_step,
            samples_per_prompt=config.samples_per_prompt,
            max_off_policy_steps=config.max_off_policy_steps,
        )

    def _resume(self, folder: Path | None) -> dict[int, Progress]:
        """Progress by step: of the checkpoint in `folder`, and after each batch that was shipped since."""
        progress = Progress()
        if folder:
            saved = StepFolder(folder).orchestrator_state()
            if saved is None or not saved.progress:
                raise Damaged(f"{folder / ORCHESTRATOR_STATE}: does not say how far the run had come")
            progress = Progress(**saved.progress)
        by_step = {progress.step: progress}
        while (batch := self._shipped_already(progress.step + 1)) is not None:
            progress = by_step[batch.step] = progress.after(batch)
        self.ledger.unship_after(progress.step)
        return by_step

    def _shipped_already(self, step: int) -> ShippedBatch | None:
        """The batch of `step`: its file is there, or was and a checkpoint has made it needless since."""
        known = self.ledger.shipped(step)
        batch = self.run_directory.batch(self.attempt, step)
        if batch is None:
            return known if (self.store.latest() or 0) >= step else None
        noted, known = known, batch.header.ledger
        if noted != known:  # it died between writing the file and noting it, or the ledger was lost or edited
            if noted is not None:
                logger.warning("the ledger's batch %d is not the file's, which is trained on", step)
            places = [place for first, last in known.places for place in range(first, last + 1)]
            self.ledger.ship(known, dict(zip(places, batch.header.problems, strict=True)))
        return known

    async def run(self) -> int:
        """Ship batches until the trainer says that the run ends. Returns the last step.

        Raises:
            DeadlinePassed: the trainer did not answer in time.
            LedgerFailed: the disk is full, or another program changed the ledger.
            AttemptOver: the trainer was started anew meanwhile.
            EnvironmentFailed, PromptRefused: a problem can't be asked, or an answer not rewarded.
            AdvantageFailed: answers can't be compared.
            Exception: what the servers' client raises where they fail for good.
        """
        following = asyncio.create_task(self._follow_trainer())
        shipping = asyncio.create_task(self._make_batches())
        try:
            done, _ = await asyncio.wait((following, shipping), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return await following
        except sqlite3.DatabaseError as error:
            raise LedgerFailed(
                f"the ledger {self.ledger.path} can't be written or read: {error}. Go on with --ckpt.resume "
                "auto: if it is damaged, it is made again from the newest checkpoint and the batches since"
            ) from error
        finally:
            unfinished = [following, shipping, *(task for task, _ in self._prompts.answering.values())]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
            self._disk.shutdown()
            self.environment.close()
            self.ledger.close()

    async def _on_disk(self, write: Callable[..., None], *arguments: object) -> None:
        """Do what waits for the disk, while prompts and answers go on; it is done when `run` returns."""
        await asyncio.get_running_loop().run_in_executor(self._disk, write, *arguments)

    # Following the trainer: versions to the servers, parts to checkpoints.

    async def _follow_trainer(self) -> int:
        """Save and serve each policy that the trainer announces, until the last; returns its step."""
        announced = self.run_directory.announced_versions(self.attempt)
        step = announced[0] - 1 if announced else self.attempt.start_step
        if not announced:
            await self._serve_start(step)
        while True:
            message = await self._announcement(step + 1)
            while message is not None:  # whoever lags behind serves the newest only, but leaves out no save
                step = message.version
                if message.save:
                    await self._save(step)
                last = message.last
                message = self._announced(step + 1)
            self.progress = {later: p for later, p in self.progress.items() if later >= step}
            self.ledger.fold(self.store.latest() or 0)
            serve = self._serve_announced(step)
            if last:  # nobody is going to sample from it: whether a server takes it does not matter
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(serve, LAST_PUSH)
                return step
            await serve

    async def _announcement(self, step: int) -> Announcement:
        """The trainer's announcement of policy version `step`; its deadline runs while it has the batch.

        Raises:
            DeadlinePassed: it did not come.
            AttemptOver: another attempt of the run has begun.
        """
        patience, checked = None, time.monotonic()
        while (message := self._announced(step)) is None:
            now = time.monotonic()
            if self.shipped < step:
                patience = None
            elif patience is None:
                patience = Patience(self.config.version_timeout)
            elif patience.over:
                raise DeadlinePassed(
                    f"waited {self.config.version_timeout:g} s for the trainer's policy version {step}; "
                    "--orchestrator.version-timeout allows more"
                )
            if now - checked > 1:
                checked = now
                self._check_attempt()
            await asyncio.sleep(POLL_SECONDS)
        return message

    def _announced(self, step: int) -> Announcement | None:
        """The announcement of version `step`; it can be there before its batch is noted as shipped."""
        return self.run_directory.announced_version(self.attempt, step) if step <= self.shipped else None

    async def _first_probe(self, step: int) -> Probe:
        """What the trainer gives the probe with the policy that it starts from.

        Raises:
            DeadlinePassed: it has not said so in time.
            AttemptOver: another attempt of the run has begun.
        """
        patience, checked = Patience(self.config.version_timeout), time.monotonic()
        while (probe := read_probe(self.run_directory.version_folder(step))) is None:
            if patience.over:
                raise DeadlinePassed(
                    f"waited {self.config.version_timeout:g} s for the trainer to score the probe of policy "
                    f"{step}; --orchestrator.version-timeout allows more, --no-self-check does without"
                )
            if time.monotonic() - checked > 1:
                checked = time.monotonic()
                self._check_attempt()
            await asyncio.sleep(POLL_SECONDS)
        return probe

    def _check_attempt(self) -> None:
        current = self.run_directory.attempt()
        if current and current.id != self.attempt.id:
            raise AttemptOver(f"attempt {self.attempt.id} is over, {current.id} has begun")

    async def _serve_start(self, step: int) -> None:
        """Serve the policy that the attempt starts from; with the self-check, servers have to prove it.

        Of a checkpoint, the trainer's probe says that it has read and checked all of it: no server is given
        damaged weights. (Without the self-check the launcher has checked it before.) Of a new run's model,
        answers come before the probe does, and count once the servers have reproduced it.
        """
        if not self.config.self_check:
            await self._serve(self.policy_folder, step)
            return
        with explained(self.policy_folder):
            if self.attempt.resume_from:
                await self._serve(self.policy_folder, step, probe=await self._first_probe(step))
            else:
                await self._serve(self.policy_folder, step, probe_follows=True)
                await self.servers.prove(await self._first_probe(step))

    async def _serve_announced(self, step: int) -> None:
        """Serve a policy that the trainer has published."""
        folder = self.run_directory.version_folder(step)
        probe = read_probe(folder) if self.config.self_check else None
        first = step == self.attempt.start_step + 1
        with explained(self.policy_folder) if first else contextlib.nullcontext():
            await self._serve(folder, step, probe=probe)

    async def _serve(
        self, folder: Path, step: int, *, probe: Probe | None = None, probe_follows: bool = False
    ) -> None:
        """Put the policy after `step` steps into every server; prompts may go there from then on."""
        fault_point("orchestrator.before_push")
        version = self.attempt.version(step)
        if self.config.max_off_policy_steps == 0:
            self.versions.clear()
        self.versions.add(version)
        try:
            await self.servers.serve(str(folder), version, probe=probe, probe_follows=probe_follows)
        except WeightsGone:
            logger.info("version %s is gone: the trainer is about to announce a newer one", version)
            return
        self.run_directory.forget_versions(step)
        self.policy_step = step
        self._changed.set()
        logger.info("version %s is served", version)

    async def _save(self, step: int) -> None:
        """Write the orchestrator's part of checkpoint `step`; the trainer commits it."""
        progress = self.progress.get(step)
        if progress is None or self.store.has_part(step, "orchestrator", self.attempt.id):
            return  # written by a process that died since
        problems = self.environment.problems
        epoch, position = divmod(progress.total_problems, problems)
        record = OrchestratorRecord(
            progress=asdict(progress),
            seed=self.config.seed,
            recipe=self.recipe,
            prompts={
                "environment": self.config.environment.model_dump(),
                "problems": problems,
                "epoch": epoch,
                "position": position,
            },
        )
        files = {ORCHESTRATOR_STATE: record.to_json(), LEDGER: self.ledger.snapshot()}

        def write() -> None:
            self.store.begin(step, ["orchestrator"])
            fault_point("orchestrator.before_part")
            read_back = self.config.ckpt.verify == "save"
            self.store.write_part(step, "orchestrator", files, self.attempt.id, read_back=read_back)

        await self._on_disk(write)

    # Making batches: prompts to the servers, whole groups to the trainer.

    async def _make_batches(self) -> None:
        """Keep the servers busy, and ship whatever is ready."""
        while True:
            self._changed.clear()
            self._prompts.collect()
            while (groups := self._next_batch()) is not None:
                await self._ship(self.shipped + 1, groups)
            self._issue()
            await self._changed.wait()

    def _issue(self) -> None:
        """Give prompts to the servers: as many as can be used before they are too old."""
        if self.policy_step is None:
            return
        config, prompts = self.config, self._prompts
        horizon = min(self.policy_step + 1 + config.max_off_policy_steps, config.max_steps)
        wanted = (horizon - self.shipped) * config.prompts_per_step
        at_once = max(1, config.max_in_flight // config.samples_per_prompt)
        while len(prompts.answering) < at_once:
            # A trainer that goes on from a checkpoint has yet to make again the policy of the newest ones.
            group = next((group for group in prompts.partial if group.policy_step <= self.policy_step), None)
            if group is not None:
                prompts.partial.remove(group)
            elif len(prompts) < wanted:
                group = self.sampler.begin(prompts.next_place(), self.policy_step)
            else:
                return
            task = asyncio.create_task(self.sampler.complete(group))
            task.add_done_callback(lambda _: self._changed.set())
            prompts.answering[group.place] = task, group

    def _next_batch(self) -> list[AnswerGroup] | None:
        """The groups of the next batch, oldest first come, if enough are ready; those too old are dropped."""
        step, size = self.shipped + 1, self.config.prompts_per_step
        for group in self._prompts.older_than(step - 1 - self.config.max_off_policy_steps):
            self.ledger.drop(group.place, "stale", step)
            self._prompts.drop(group.place)
            self._dropped += 1
        if len(self._prompts.ready) < size:
            return None
        by_age = sorted(self._prompts.ready.values(), key=lambda group: (group.oldest_step, group.place))
        chosen = by_age[:size]
        for group in chosen:
            del self._prompts.ready[group.place]
        return sorted(chosen, key=lambda group: group.place)

    async def _ship(self, step: int, groups: list[AnswerGroup]) -> None:
        """Write the batch of `step`, and note it in the ledger."""
        samples = [sample for group in groups for sample in to_samples(group, self.advantage)]
        batch = Batch(samples, sampling=Sampling(self.config.sampling.temperature))
        row = ShippedBatch(
            step=step,
            places=to_ranges(group.place for group in groups),
            samples=len(batch.samples),
            tokens=sum(len(sample.token_ids) for sample in batch.samples),
            digest=batch.digest(),
            oldest_step=min(group.oldest_step for group in groups),
        )
        progress = self.progress[self.shipped].after(row)
        problems = {group.place: group.problem for group in groups}
        metrics = {
            **batch_metrics(groups, step),
            "groups/dropped": self._dropped,
            "epoch": progress.total_problems / self.environment.problems,
            "total_problems": progress.total_problems,
            **self.servers.take_metrics(),
        }
        versions = {version for group in groups for version in group.versions}
        header = BatchHeader(
            run_id=self.attempt.run_id,
            branch=self.attempt.branch,
            attempt=self.attempt.id,
            step=step,
            version=max(versions, key=lambda version: PolicyName.parse(version).step),
            problems=list(problems.values()),
            ledger=row,
        )
        shipped = RLBatch(samples, metrics, sampling=batch.sampling, header=header)
        fault_point("orchestrator.before_ship")
        await self._on_disk(write_batch, batch_path(self.run_directory.batches, step), shipped)
        fault_point("orchestrator.shipped")
        self.ledger.ship(row, problems)
        self.progress[step] = progress
        self.shipped = step
        self._dropped = 0
        logger.info("batch %d: reward %.3f", step, metrics["reward/mean"])
