"""What trainer and server say of the same tokens: the kept rollouts, and what the trainer has learned from.

Rollouts (`rollouts/`) have ids and the server's logprobs, files of the trainer (`tokens/`) the trainer's
logprobs and entropies. A branch of a conversation and a sample of a batch are the same tokens if they follow
the same prompt, have the same ids, and the server gave these the same logprobs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.run.messages import PolicyName
from cairn.run.trained_tokens import Array, TrainedSample, TrainedTokens, digest_of

KEYS = ("place", "sample", "problem")
"""What names a rollout of a step."""


@dataclass(frozen=True)
class TurnTokens:
    """The T sampled tokens of a turn: float32 [T], NaN where nothing is known.

    sampled: the server's logprobs. trained: the trainer's, of learned tokens, under the weights at their
    first update in the step. entropies: of learned tokens, nats, if the loss computes them. versions: the
    steps of the policies that sampled them; None where a name can't be read.
    """

    sampled: Array
    trained: Array
    entropies: Array
    versions: Sequence[int | None]

    @property
    def learned(self) -> Array:
        """Which tokens were learned from, bool [T]: not those that were masked, cut off or left out."""
        return np.isfinite(self.trained)

    @property
    def gaps(self) -> Array:
        """The trainer's logprobs minus the server's."""
        return self.trained - self.sampled

    @property
    def ratios(self) -> Array:
        """Importance ratios: a token's probability for the trainer over that for the server."""
        return np.exp(self.gaps)


class StepTokens:
    """What the trainer has learned from in a step."""

    def __init__(self, samples: Sequence[TrainedSample]):
        self.known = bool(samples)
        self._by_prompt: dict[int, list[TrainedSample]] = {}
        for sample in samples:
            self._by_prompt.setdefault(sample.prompt, []).append(sample)

    def of(self, turns: Sequence[Mapping[str, Any]]) -> list[TurnTokens]:
        """The tokens of each turn of a rollout, as its row has the turns."""
        sampled = [_sampled(turn) for turn in turns]
        found: dict[int, tuple[Array, Array]] = {}
        for branch in dict.fromkeys(turn["branch"] for turn in turns):
            own = [number for number, turn in enumerate(turns) if turn["branch"] == branch]
            parts = [sampled[number] for number in own]
            prompt = digest_of(np.asarray(turns[own[0]]["prompt_ids"] or [], np.int32))
            ids, logprobs = (np.concatenate(columns) for columns in zip(*parts, strict=True))
            sample = self._find(prompt, ids, logprobs)
            ends = np.cumsum([len(part) for part, _ in parts])[:-1]
            known = (sample.logprobs, sample.entropies) if sample is not None else (None, None)
            trained, entropies = (np.split(_padded(values, len(ids)), ends) for values in known)
            found |= dict(zip(own, zip(trained, entropies, strict=True), strict=True))
        return [
            TurnTokens(sampled[number][1], *found[number], _versions(turn))
            for number, turn in enumerate(turns)
        ]

    def _find(self, prompt: int, ids: Array, logprobs: Array) -> TrainedSample | None:
        """The sample that has these tokens, or, if its row was too short for them, the beginning of them."""
        same = [
            one
            for one in self._by_prompt.get(prompt, [])
            if np.array_equal(one.token_ids, ids[: len(one)])
            and np.array_equal(one.sampler_logprobs, logprobs[: len(one)], equal_nan=True)
        ]
        return max(same, key=len, default=None)


def _sampled(turn: Mapping[str, Any]) -> tuple[Array, Array]:
    """Ids and the server's logprobs, as many of each."""
    ids = np.asarray(turn["token_ids"] or [], np.int32)
    logprobs = np.asarray(turn["logprobs"] or [], np.float32)
    return ids, _padded(logprobs[: len(ids)], len(ids))


def _padded(values: Array | None, length: int) -> Array:
    whole = np.full(length, np.nan, np.float32)
    if values is not None:
        whole[: len(values)] = values
    return whole


def _versions(turn: Mapping[str, Any]) -> list[int | None]:
    steps: list[int | None] = [None] * len(turn["token_ids"] or [])
    for span in turn["versions"] or []:
        begin, end = max(span["start"], 0), min(span["end"], len(steps))
        steps[begin:end] = [step_of(span["version"])] * max(end - begin, 0)
    return steps


def step_of(version: str) -> int | None:
    """The optimiser step of a policy by its name; None if it is no such name."""
    try:
        return PolicyName.parse(version).step
    except ValueError:
        return None


def token_columns(rollouts: KeptRollouts, trained: TrainedTokens, step: int) -> dict[str, Array]:
    """Every sampled token of the kept rollouts of a step, with what trainer and server say of it, by column.

    Raises:
        DamagedFile: a file can't be read.
    """
    tokens, parts = StepTokens(trained.read(step)), list[dict[str, Any]]()
    for row in rollouts.read(step, [*KEYS, "turns"]):
        turns = row["turns"] or []
        for number, (turn, found) in enumerate(zip(turns, tokens.of(turns), strict=True)):
            count = len(found.sampled)
            parts.append(
                {
                    **{name: np.full(count, row[name], np.int64) for name in KEYS},
                    "turn": np.full(count, number, np.int64),
                    "position": np.arange(count),
                    "token_id": np.asarray(turn["token_ids"] or [], np.int64),
                    "policy_step": np.asarray(found.versions, np.float64),
                    "sampler_logprob": found.sampled,
                    "logprob": found.trained,
                    "gap": found.gaps,
                    "ratio": found.ratios,
                    "entropy": found.entropies,
                    "learned": found.learned,
                }
            )
    return {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}
