"""The orchestrator: prompts, rollouts, rewards, batches, and the policy's way to the servers."""

import asyncio
import contextlib
import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig

from cairn.checkpoint.store import CheckpointStore
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments import make_environment
from cairn.orchestrator.ledger import Ledger
from cairn.orchestrator.rollouts import (
    AttemptOver,
    Generation,
    Group,
    PolicyServer,
    Rollout,
    StalePolicy,
    batch_metrics,
    to_samples,
    token_versions,
)
from cairn.run.batches import Batch, batch_path, write_batch
from cairn.run.directory import Attempt, RunDirectory
from cairn.run.faults import fault_point
from cairn.run.files import read_json
from cairn.run.seeds import derive, permutation
from cairn.run.waiting import wait_for

logger = logging.getLogger(__name__)

LAST_PUSH = 30  # seconds for the servers to take the final policy
ATTEMPTS = 5  # to have a prompt answered by the right policy


@dataclass
class Progress:
    """How far the orchestrator has come: steps shipped, and what was in their batches."""

    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0
    total_problems: int = 0


class Orchestrator:
    """Ships one batch a step, sampled from the policy that the step before it made."""

    def __init__(self, config: OrchestratorConfig, attempt: Attempt, servers: list[PolicyServer]):
        """Take up the run where `attempt` starts.

        Args:
            config: its `model.name` is the local directory of the policy to start from, unless the attempt
                resumes.
            servers: clients of the inference servers.

        Raises:
            BadEnvironment: the environment can't be made.
        """
        self.config = config
        self.attempt = attempt
        self.servers = servers
        self.run_directory = RunDirectory(config.output_dir, config.ckpt and config.ckpt.dir)
        self.store = CheckpointStore(self.run_directory.checkpoints)
        self.environment = make_environment(config.environment)
        self.progress = Progress()
        self.policy_folder = Path(config.model.name)
        if attempt.resume_from:
            self._load(Path(attempt.resume_from))
        self.tokenizer = AutoTokenizer.from_pretrained(self.policy_folder)
        self.stop_token_ids = _stop_tokens(self.policy_folder, self.tokenizer.eos_token_id)
        self.ledger = Ledger(self.run_directory.ledger, attempt.run_id, attempt.branch)
        self.version = ""
        self._epoch = -1
        self._order: list[int] = []
        self._reattaching = asyncio.Lock()

    async def run(self) -> int:
        """Ship batches until the trainer says that the run ends. Returns the last step.

        Batches that were shipped before this process began, by one that died, are not made again.

        Raises:
            DeadlinePassed: the trainer did not answer in time.
            StalePolicy: a server samples from other weights than it was given.
            AttemptOver: the trainer was started anew meanwhile.
        """
        try:
            shipped = self._shipped_already()
            last = await self._settle(self.progress.step) if shipped else False
            if not shipped:
                await self._push(self.policy_folder, self.progress.step)
            while not last:
                step = self.progress.step + 1
                await self._ship(step)
                last = await self._settle(step)
            return self.progress.step
        finally:
            self.ledger.close()

    def _shipped_already(self) -> bool:
        """Take up the progress after the newest batch beyond the starting point, if there is any."""
        found = False
        while (batch := self.run_directory.batch(self.attempt, self.progress.step + 1)) is not None:
            self.progress = Progress(**batch.info["progress"])
            found = True
        return found

    async def _settle(self, step: int) -> bool:
        """Wait until the trainer has made the policy of `step`, save if it does, and put it into the servers.

        Returns whether the run ends here.
        """
        announced = await asyncio.to_thread(
            wait_for,
            lambda: self._announced(step),
            seconds=self.config.version_timeout,
            whom=f"the trainer's policy version {step}",
            setting="--orchestrator.version-timeout",
        )
        if announced["save"]:
            self._save(step)
        newest = self.store.latest()
        if newest is not None:
            self.ledger.fold(newest)
        if announced["last"]:  # nobody is going to sample from it: whether a server takes it does not matter
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._push(self.run_directory.version_folder(step), step), LAST_PUSH)
            return True
        await self._push(self.run_directory.version_folder(step), step)
        return False

    def _announced(self, step: int) -> dict | None:
        """The trainer's announcement of policy version `step`, once it is there."""
        announced = self.run_directory.announced_version(self.attempt, step)
        if announced is None:
            current = self.run_directory.attempt()
            if current and current.id != self.attempt.id:
                raise AttemptOver(f"attempt {self.attempt.id} is over, {current.id} has begun")
        return announced

    async def _push(self, folder: Path, step: int) -> None:
        """Put the policy after `step` steps into every server; each confirms the version."""
        started = time.monotonic()
        self.policy_folder = folder
        self.version = self.attempt.version(step)
        await asyncio.gather(*(server.update_weights(str(folder), self.version) for server in self.servers))
        self._push_seconds = time.monotonic() - started
        logger.info("version %s is served, after %.3f s", self.version, self._push_seconds)

    async def _reattach(self, server: PolicyServer) -> None:
        """Give a server that was restarted, and so has lost them, the current weights again."""
        async with self._reattaching:
            if (await server.status()).weight_version != self.version:
                logger.warning("%s has lost its weights; it gets version %s again", server.url, self.version)
                await server.update_weights(str(self.policy_folder), self.version)

    async def _ship(self, step: int) -> None:
        """Sample the answers to the next prompts, reward them, and write the batch of `step`."""
        started = time.monotonic()
        first = self.progress.total_problems
        places = range(first, first + self.config.prompts_per_step)
        limit = asyncio.Semaphore(max(1, self.config.max_in_flight // self.config.samples_per_prompt))
        groups = await asyncio.gather(*(self._sample(place, step, limit) for place in places))
        samples = [
            sample
            for group in groups
            for sample in to_samples(group, normalize=self.config.normalize_advantages)
        ]
        progress = self.progress
        progress.step = step
        progress.total_problems += len(groups)
        progress.total_samples += len(samples)
        progress.total_tokens += sum(len(sample.token_ids) for sample in samples)
        metrics = {
            **batch_metrics(groups),
            "epoch": progress.total_problems / len(self.environment),
            "total_problems": progress.total_problems,
            "time/generate": time.monotonic() - started,
            "time/push": self._push_seconds,
        }
        info = {
            "run_id": self.attempt.run_id,
            "branch": self.attempt.branch,
            "attempt": self.attempt.id,
            "step": step,
            "version": self.version,
            "progress": asdict(progress),
            "problems": [group.problem for group in groups],
            "temperature": self.config.sampling.temperature,
        }
        write_batch(batch_path(self.run_directory.batches, step), Batch(samples, metrics, info))
        self.ledger.ship(places)
        logger.info("batch %d: reward %.3f", step, metrics["reward/mean"])

    async def _sample(self, place: int, step: int, limit: asyncio.Semaphore) -> Group:
        """All answers to the problem at `place` in the prompt order, from the ledger if they are there."""
        if (finished := self.ledger.finished(place, step, self.version)) is not None:
            return finished
        epoch, index = divmod(place, len(self.environment))
        problem = self._problem(epoch, index)
        rendered = self.tokenizer.apply_chat_template(
            self.environment.messages(problem), add_generation_prompt=True, tokenize=True, return_dict=True
        )
        sampling = self.config.sampling
        server = self.servers[place % len(self.servers)]
        async with limit:
            for _ in range(ATTEMPTS):
                generations = await server.generate(
                    rendered["input_ids"],
                    n=self.config.samples_per_prompt,
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    seed=derive(self.config.seed, "sample", place, step - 1),
                    stop_token_ids=self.stop_token_ids,
                )
                if all(self._is_current(generation) for generation in generations):
                    break
                await self._reattach(server)
            else:
                raise StalePolicy(
                    f"{server.url} does not sample from {self.version}, though it was given it again and "
                    "again: does another run push weights to the same server?"
                )
        rollouts = []
        for generation in generations:
            text = self.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
            rollouts.append(
                Rollout(
                    token_ids=generation.token_ids,
                    logprobs=generation.logprobs,
                    versions=token_versions(generation),
                    text=text,
                    reward=self.environment.reward(problem, text),
                    complete=generation.finish_reason == "stop",
                )
            )
        group = Group(place, problem, rendered["input_ids"], rollouts)
        self.ledger.finish(group, step, self.version)
        return group

    def _is_current(self, generation: Generation) -> bool:
        """Whether every token was sampled from the policy that the servers should have."""
        versions = token_versions(generation)
        complete = len(versions) == len(generation.token_ids) and generation.finish_reason != "abort"
        return complete and set(versions) <= {self.version}

    def _problem(self, epoch: int, index: int) -> int:
        """The problem at `index` of an epoch's own seeded order."""
        if epoch != self._epoch:
            self._order = permutation(len(self.environment), self.config.seed, "prompt order", epoch)
            self._epoch = epoch
        return self._order[index]

    def _save(self, step: int) -> None:
        """Write the orchestrator's part of checkpoint `step`; the trainer commits it."""
        if self.store.has_part(step, "orchestrator", self.attempt.id):
            return  # written by a process that died since
        self.store.begin(step, ["orchestrator"])
        state = {
            "progress": asdict(self.progress),
            "seed": self.config.seed,
            "prompts": {
                "environment": self.config.environment.model_dump(),
                "problems": len(self.environment),
                "epoch": self.progress.total_problems // len(self.environment),
                "position": self.progress.total_problems % len(self.environment),
            },
        }
        files = {
            "orchestrator/state.json": (json.dumps(state, indent=2) + "\n").encode(),
            "orchestrator/ledger.sqlite": self.ledger.snapshot(),
        }
        fault_point("orchestrator.before_part")
        self.store.write_part(step, "orchestrator", files, self.attempt.id)

    def _load(self, folder: Path) -> None:
        saved = read_json(folder / "orchestrator" / "state.json")
        self.progress = Progress(**saved["progress"])
        self.policy_folder = folder / "model"
        if saved["prompts"]["problems"] != len(self.environment):
            logger.warning(
                "the environment has %d problems now and had %d when the checkpoint was saved: "
                "the prompt order is another one",
                len(self.environment),
                saved["prompts"]["problems"],
            )


def _stop_tokens(folder: Path, eos_token_id: int | None) -> list[int]:
    """The tokens that end an answer: the tokenizer's end-of-text token and the model's own list."""
    ids = {eos_token_id} if eos_token_id is not None else set()
    if (folder / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
        ids |= set(eos if isinstance(eos, list) else [eos] if eos is not None else [])
    return sorted(ids)
