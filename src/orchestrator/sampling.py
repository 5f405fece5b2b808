"""From a prompt to its whole, rewarded answers, written down piece by piece."""

import asyncio
from collections.abc import Collection
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments import Environment
from cairn.orchestrator.ledger import Ledger
from cairn.orchestrator.rollouts import Generation, Group, PolicyServers, Rollout
from cairn.run.faults import fault_point
from cairn.run.seeds import derive, permutation


class Sampler:
    """Has the servers answer the run's prompts, and the environment reward the answers.

    Long answers are asked for in pieces of `sampling.chunk_tokens`. Each piece is in the ledger before the
    next is asked for, and draws from a seed of its own, so that an answer which is taken up again after a
    crash comes out as if there had been none.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        environment: Environment,
        model: Path,
        servers: PolicyServers,
        ledger: Ledger,
        versions: Collection[str],
    ):
        """Prepare to sample.

        Args:
            model: the Hugging Face directory whose tokenizer and end tokens count.
            versions: the policy versions that tokens may come from; the owner may change it at any time.
        """
        self.config = config
        self.environment = environment
        self.servers = servers
        self.ledger = ledger
        self.versions = versions
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.stop_token_ids = _stop_tokens(model, self.tokenizer.eos_token_id)
        self._epoch = -1
        self._order: list[int] = []

    def begin(self, place: int, policy_step: int) -> Group:
        """The group of the prompt at `place` in the prompt order, without answers as yet; in the ledger."""
        epoch, index = divmod(place, len(self.environment))
        if epoch != self._epoch:
            self._order = permutation(len(self.environment), self.config.seed, "prompt order", epoch)
            self._epoch = epoch
        problem = self._order[index]
        prompt_ids = self.tokenizer.apply_chat_template(
            self.environment.messages(problem), add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        group = Group(place, problem, policy_step, prompt_ids, [])
        self.ledger.issue(group)
        return group

    async def complete(self, group: Group) -> Group:
        """Sample and reward whatever of the group's answers is not there yet.

        Raises:
            Exception: what the servers' client raises where they fail for good.
        """
        if not group.rollouts:
            n, seed = self.config.samples_per_prompt, self._seed(group, 0)
            generations = await self._generate(group, group.prompt_ids, 0, seed, n)
            group.rollouts = [Rollout(seed + i) for i in range(n)]
            self._add(group, dict(enumerate(generations)))
        await asyncio.gather(
            *(self._finish(group, i) for i, rollout in enumerate(group.rollouts) if rollout.reward is None)
        )
        fault_point("orchestrator.finished_group")
        return group

    async def _finish(self, group: Group, i: int) -> None:
        """Ask for the rest of answer `i`, piece by piece."""
        rollout = group.rollouts[i]
        while rollout.reward is None:
            done = len(rollout.token_ids)
            seed = self._seed(group, done // self.config.sampling.chunk_tokens) + i
            (piece,) = await self._generate(group, group.prompt_ids + rollout.token_ids, done, seed, 1)
            self._add(group, {i: piece})

    def _seed(self, group: Group, chunk: int) -> int:
        """Of a piece of the group's first answer; those of the others follow it."""
        return derive(self.config.seed, "sample", group.place, group.policy_step, *([chunk] if chunk else []))

    async def _generate(
        self, group: Group, token_ids: list[int], done: int, seed: int, n: int
    ) -> list[Generation]:
        sampling = self.config.sampling
        return await self.servers.generate(
            token_ids,
            affinity=group.place,
            versions=self.versions,
            n=n,
            max_tokens=min(sampling.chunk_tokens, sampling.max_tokens - done),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=seed,
            stop_token_ids=self.stop_token_ids,
        )

    def _add(self, group: Group, pieces: dict[int, Generation]) -> None:
        """Add each piece to its answer, reward those that are whole now, and write all down."""
        for i, piece in pieces.items():
            rollout = group.rollouts[i]
            rollout.extend(piece, self.config.sampling.max_tokens)
            if rollout.finish_reason is not None:
                rollout.text = self.tokenizer.decode(rollout.token_ids, skip_special_tokens=True)
                rollout.reward = self.environment.reward(group.problem, rollout.text)
        self.ledger.record(group.place, {i: group.rollouts[i] for i in pieces})


def _stop_tokens(folder: Path, eos_token_id: int | None) -> list[int]:
    """The tokens that end an answer: the tokenizer's end-of-text token and the model's own list."""
    ids = {eos_token_id} if eos_token_id is not None else set()
    if (folder / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
        ids |= set(eos if isinstance(eos, list) else [eos] if eos is not None else [])
    return sorted(ids)
