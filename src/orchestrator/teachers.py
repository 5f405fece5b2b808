"""Served references and teachers: what they say of a batch's tokens is shipped with it.

So a batch is scored once, whatever happens to the trainer afterwards, and a step that is computed again
computes the same.
"""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.teachers import ONLY_AT_ONE, WithTeachers
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.servers import TokenScores
from cairn.run.batches import COLUMNS, Sample
from cairn.run.errors import UsageError

AT_A_TIME = 64
"""Samples that a server scores at the same time; it queues more than it has room for."""
PROBE = 'The quick brown fox: 0123456789, "x_1 = {a+b}"\n\tdéjà vu, Привет, 你好 👋'
"""Text whose tokens show whether two vocabularies are the same."""


class ServedTeachers:
    """Asks the servers that the trainer's `kl.reference` and `distill.teacher` name."""

    def __init__(self, config: OrchestratorConfig, chat: ChatFormat, scores: Mapping[str, TokenScores]):
        """Nothing is asked yet.

        Args:
            scores: the servers, by the column that each fills in.

        Raises:
            UsageError: answers are sampled at another temperature than servers score at.
        """
        temperature = config.sampling.temperature
        for column in scores:
            if temperature != 1:
                raise UsageError(
                    f"{WithTeachers.sources_of[column]} = {config.teachers[column]}: {ONLY_AT_ONE}, and "
                    f"sampling.temperature = {temperature:g}: sample at 1, or give a folder"
                )
        self._chat = chat
        self._scores = scores
        self._checked = False
        self._slots = asyncio.Semaphore(AT_A_TIME)

    async def score(self, samples: Sequence[Sample]) -> None:
        """Add the columns of all servers to `samples`.

        Raises:
            UsageError: a server has another vocabulary, or refuses a request.
            ServerUnavailable: a server does not answer in time.
        """
        if not self._scores:
            return
        if not self._checked:
            text = self._chat.tokenizer.decode(
                self._chat.tokenizer.encode(PROBE, add_special_tokens=False), skip_special_tokens=True
            )
            tokens = self._chat.tokenizer.encode(text, add_special_tokens=False)
            for scores in self._scores.values():
                await scores.check(text, tokens)
            self._checked = True
        tasks = [
            asyncio.create_task(self._add(sample, column, scores))
            for column, scores in self._scores.items()
            for sample in samples
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _add(self, sample: Sample, column: str, scores: TokenScores) -> None:
        values = np.full(len(sample.token_ids), COLUMNS[column].default, COLUMNS[column].dtype)
        if sample.loss_mask.any():
            async with self._slots:
                values[1:] = await scores.logprobs(sample.token_ids.tolist())
            values[~sample.loss_mask] = COLUMNS[column].default
        sample.columns = {**sample.columns, column: values}  # another sample may have the same mapping
