"""The orchestrator: prompts, rollouts, rewards, batches, and the transfer of policies to the servers.

Two tasks run concurrently. `following.py` follows the trainer and has the servers load each policy version
that it announces, while they go on generating. `batching.py` keeps prompts at the servers and ships a batch
as soon as enough answers are complete. `max_off_policy_steps` bounds how far the two drift apart; at 0 they
alternate.
"""

import asyncio
import sqlite3
from collections.abc import Mapping

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.batching import BatchMaker
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.completers import make_completer
from cairn.orchestrator.completion.completion import tried_again
from cairn.orchestrator.evaluation import Evaluations
from cairn.orchestrator.ledger import LedgerFailed
from cairn.orchestrator.policy_sync.following import TrainerFollower
from cairn.orchestrator.policy_sync.gpu_turns import make_sharing
from cairn.orchestrator.policy_sync.resume import first_policy, take_up
from cairn.orchestrator.prompts.sources import make_sources
from cairn.orchestrator.servers import PolicyServers, TokenScores
from cairn.orchestrator.teachers import ServedTeachers
from cairn.run import noted_calls
from cairn.run.messages import Attempt
from cairn.run.recipe import template_arguments

LONG_CALL = 5.0
"""Seconds after which a call of user code, or a rollout, is named as what the orchestrator is doing."""
SERVING = "serving requests, rewards and batches"
"""What an orchestrator does."""


class Orchestrator:
    """Ships one batch per step, sampled from policies at most `max_off_policy_steps` behind the newest."""

    def __init__(
        self,
        config: OrchestratorConfig,
        attempt: Attempt,
        servers: PolicyServers,
        scores: Mapping[str, TokenScores] | None = None,
    ):
        """Take up the run at the step that `attempt` starts from, plus what the ledger has recorded since.

        Args:
            config: its `model.name` is the local directory of the policy to start from, unless the attempt
                resumes.
            servers: the inference servers.
            scores: served models that score batches, by the column that each fills in.

        Raises:
            BadEnvironment: an environment can't be made.
            BadExtension: an advantage can't be made.
            CheckpointError: the checkpoint's ledger can't be read.
        """
        sources = make_sources(config)
        policy = first_policy(config, attempt)
        self.state = take_up(config, attempt, sources, servers)
        chat = ChatFormat(policy, template_arguments(self.state.recipe))
        ledger, versions = self.state.ledger, self.state.policy.versions
        self._completers = [
            make_completer(source.config, source.environment, chat, servers, ledger, versions)
            for source in sources
        ]
        self.evaluations = Evaluations(self.state, chat)
        sharing = make_sharing(self.state, self.evaluations.due)
        teachers = ServedTeachers(config, chat, scores or {})
        self.batches = BatchMaker(self.state, self._completers, sharing, chat, teachers)
        self.follower = TrainerFollower(self.state, policy, sharing, self.evaluations)

    @property
    def doing(self) -> str:
        """What it is doing, for its sign of life: also what is tried again, and why."""
        failing, oldest = tried_again([one.retrying for one in self._completers]), noted_calls.oldest()
        found = [SERVING]
        if oldest is not None and oldest[1] >= LONG_CALL:
            found.append(f"{oldest[0]} for {oldest[1]:.0f} s")
        return "; ".join(found if failing is None else [*found, failing])

    async def run(self) -> int:
        """Ship batches until the trainer announces the last policy. Returns the last step.

        Raises:
            DeadlinePassed: the trainer did not answer in time.
            LedgerFailed: the disk is full, or another program changed the ledger.
            AttemptOver: a new attempt of the run has begun.
            EnvironmentFailed: nothing can be learned from several prompts in a row.
            AdvantageFailed: the advantage fails on a group.
            UsageError: a served teacher has another vocabulary, or refuses a request.
            Exception: the servers' client gives up.
        """
        following = asyncio.create_task(self.follower.run())
        shipping = asyncio.create_task(self.batches.run())
        try:
            done, _ = await asyncio.wait((following, shipping), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return await following
        except sqlite3.DatabaseError as error:
            raise LedgerFailed(
                f"the ledger {self.state.ledger.path} can't be written or read: {error}. Resume with "
                "--ckpt.resume auto: if the ledger is damaged, it is rebuilt from the newest checkpoint and "
                "the batches since"
            ) from error
        finally:
            answering = [task for task, _ in self.batches.prompts.answering.values()]
            unfinished = [following, shipping, *answering]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
            self.state.disk.close()
            for source in self.state.sources:
                source.environment.close()
            self.evaluations.close()
            self.state.ledger.close()
