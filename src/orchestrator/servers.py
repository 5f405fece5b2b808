"""What the orchestrator needs of the inference servers."""

from collections.abc import Collection
from typing import Protocol

from cairn.policy.generation import Generation, SamplingParams
from cairn.run.messages import Probe


class PolicyServers(Protocol):
    """What the orchestrator needs of the inference servers, however many there are."""

    @property
    def max_model_len(self) -> int | None:
        """Tokens that a prompt and its answer may have together on every server; None if that is unknown."""
        ...

    async def serve(
        self, folder: str, version: str, *, probe: Probe | None = None, probe_follows: bool = False
    ) -> None:
        """Have the servers load a Hugging Face directory as `version`, now and whenever they come back.

        They must reproduce the `probe`, or, if it follows, the one that `prove` is given later.
        """
        ...

    async def prove(self, probe: Probe) -> None:
        """Have the servers reproduce the probe of what they serve; until then no answer counts."""
        ...

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, affinity: int, versions: Collection[str]
    ) -> list[Generation]:
        """`params.n` continuations, all of whose tokens come from one of `versions`.

        Requests of the same `affinity` share a prefix, so one server is best for them. `versions` may change
        while this waits; what counts is what it holds when the answer is there.
        """
        ...

    def take_metrics(self) -> dict[str, float]:
        """For a step's row: what the servers did since the last call, such as `time/server_idle` seconds."""
        ...
