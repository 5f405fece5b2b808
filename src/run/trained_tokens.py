"""What the trainer computed of each token that it learned from: `tokens/step_N.R-of-W.safetensors`.

Each rank R of W writes what it trained on in step N, whole or not at all, before the next step. Whoever takes
steps again removes their files first, so that those of a step are of one pass over it. The oldest steps are
deleted when all together are larger than `trainer.keep_tokens_gb`.

A file has, for its samples one after the other, `lengths` (int32, how many tokens of each are learned) and
`prompts` (uint64, `digest_of` what stands before the first of these); and for all their learned tokens
`token_ids` (int32), `sampler_logprobs` and `logprobs` (float32, the server's and the trainer's, the latter
under the weights at the token's first update in the step), and, where the loss computes them, `entropies`
(float32, nats, of the trainer's distribution that the token is drawn from).
"""

import contextlib
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from cairn.run.files import DamagedFile, entries, write_atomic

NAME = re.compile(r"step_([0-9]+)\.[0-9]+-of-[0-9]+\.safetensors")
FORMAT = {"format": "1"}
VALUES = ("token_ids", "sampler_logprobs", "logprobs", "entropies")
"""What a file has of each learned token; `entropies` may be missing."""
Array = np.ndarray[Any, np.dtype[Any]]


def digest_of(prompt: Array) -> int:
    """Names the tokens before the first learned one of a sample, int32 of any length."""
    return int.from_bytes(hashlib.blake2b(prompt.astype("<i4").tobytes(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class TrainedSample:
    """The L learned tokens of a sample, in order; see above.

    prompt: `digest_of` the tokens before them. token_ids: int32 [L]. sampler_logprobs, logprobs, entropies:
    float32 [L].
    """

    prompt: int
    token_ids: Array
    sampler_logprobs: Array
    logprobs: Array
    entropies: Array | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


class TrainedTokens:
    """The folder of a run's files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._sizes: dict[int, int] | None = None

    def path(self, step: int, rank: int, ranks: int) -> Path:
        """The file of a step by rank `rank` of `ranks`."""
        return self.folder / f"step_{step}.{rank}-of-{ranks}.safetensors"

    def steps(self) -> list[int]:
        """The steps that have a file, oldest first."""
        return sorted({step for step, _ in self._files()})

    def write(
        self, step: int, rank: int, ranks: int, parts: Sequence[Mapping[str, Array]], gigabytes: float
    ) -> None:
        """Write a rank's file; rank 0 also deletes the oldest steps beyond `gigabytes`.

        Args:
            parts: what the file has, one part after the other, at least one.

        Raises:
            OSError: the disk is full, or can't be written.
        """
        content = save({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, FORMAT)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path(step, rank, ranks), content)
        if rank == 0:
            self._make_room(step, len(content) * ranks, gigabytes * 1e9)

    def _make_room(self, step: int, size: int, limit: float) -> None:
        """Delete the oldest steps but the newest one, `step`, of about `size` bytes on all ranks together."""
        if self._sizes is None:
            self._sizes = {}
            for there, path in self._files():
                with contextlib.suppress(FileNotFoundError):
                    self._sizes[there] = self._sizes.get(there, 0) + path.stat().st_size
        self._sizes[step] = size
        while sum(self._sizes.values()) > limit and len(self._sizes) > 1:
            self._delete(min(self._sizes))

    def forget_after(self, step: int) -> None:
        """Delete the files of later steps, which are taken again."""
        for later in {one for one, _ in self._files() if one > step}:
            self._delete(later)

    def _delete(self, step: int) -> None:
        (self._sizes or {}).pop(step, None)
        for path in self.folder.glob(f"step_{step}.*.safetensors"):
            path.unlink(missing_ok=True)

    def read(self, step: int) -> list[TrainedSample]:
        """The samples of a step, of all ranks; none if nothing is kept of it.

        Raises:
            DamagedFile: a file is no such file.
        """
        return [sample for there, path in self._files() if there == step for sample in _read(path)]

    def _files(self) -> list[tuple[int, Path]]:
        found = ((NAME.fullmatch(path.name), path) for path in entries(self.folder, ".safetensors"))
        return sorted((int(match[1]), path) for match, path in found if match)


def _read(path: Path) -> list[TrainedSample]:
    try:
        tensors = load(path.read_bytes())
        ends = np.cumsum(tensors["lengths"])[:-1]
        columns = [np.split(tensors[name], ends) for name in VALUES if name in tensors]
        prompts = [int(prompt) for prompt in tensors["prompts"]]
        if not prompts:
            return []
        return [TrainedSample(prompt, *values) for prompt, *values in zip(prompts, *columns, strict=True)]
    except FileNotFoundError:  # deleted meanwhile
        return []
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise DamagedFile(f"{path}: can't be read: {error}") from None
