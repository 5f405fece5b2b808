"""The interface to the inference servers, as the orchestrator uses it."""

from collections.abc import Collection, Sequence
from typing import Protocol

from cairn.policy.generation import Generation, SamplingParams
from cairn.run.messages import Probe


class GeneratingServers(Protocol):
    """What whoever completes answers asks of the inference servers."""

    @property
    def max_model_len(self) -> int | None:
        """Maximum tokens of a prompt and its answer together, on every server; None if unknown."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        affinity: int,
        versions: Collection[str],
        began: str | None = None,
        sessions: Sequence[int] = (),
    ) -> list[Generation]:
        """`params.n` continuations whose tokens all come from one of `versions`.

        Requests of the same `affinity` share a prefix and go to one server, for its prefix cache. `versions`
        may change during the call; its content when the answer arrives decides.

        Args:
            sessions: the numbers of the answers to the prompt that are asked for; the later turns and pieces
                of one go to the server that has the earlier ones.
            began: the policy that has sampled the first of the tokens in `prompt_ids`, if any were sampled;
                an answer that goes on may take up keys and values that were made under it.
        """
        ...


class TokenScores(Protocol):
    """A served model that gives logprobs of tokens which others have sampled."""

    async def check(self, text: str, token_ids: Sequence[int]) -> None:
        """See that its tokens of `text` are `token_ids`."""
        ...

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of all tokens but the first, at temperature 1."""
        ...


class PolicyServers(GeneratingServers, Protocol):
    """The inference servers, however many there are."""

    async def serve(
        self, folder: str, version: str, *, probe: Probe | None = None, probe_follows: bool = False
    ) -> None:
        """Have the servers load a Hugging Face directory as `version`, now and whenever one is restarted.

        They must reproduce the `probe`, or, with `probe_follows`, the one that is given to `prove` later.
        """
        ...

    async def prove(self, probe: Probe) -> None:
        """Have the servers reproduce `probe` with the weights they serve; until then no answer counts."""
        ...

    async def sleep(self) -> None:
        """Have all servers free their GPU memory until the next `serve`; returns when they sleep."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call, for a step's row, such as `time/server_idle` in seconds."""
        ...
