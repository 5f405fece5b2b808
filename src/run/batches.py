"""Training batches: what the trainer learns from in one step, in memory and as files.

A batch file is one safetensors file, so that anything can read it: the samples' tokens end to end, their
lengths, and what belongs to each token. Its metadata says which step of which run it is for.
"""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from cairn.run.errors import UsageError
from cairn.run.file_system import appears
from cairn.run.files import DamagedFile, entries, write_atomic
from cairn.run.messages import BatchHeader

BATCH_NAME = re.compile(r"step_([0-9]+)\.safetensors")
EXPERTS = "experts"
"""The column with the experts that a server chose."""
UNKNOWN_EXPERT = -1
"""In its place where nobody knows."""
TARGETS = "targets"
"""The column with the tokens whose logprobs are wanted, where these are not the sample's own."""
WEIGHTS = "weights"
"""The column with what the logprob of each token counts for."""


@dataclass(frozen=True)
class Column:
    """A value that each token of a sample has, beside its id and whether it is learned.

    default: of tokens that nobody gives a value for, such as those of a prompt.
    summed: whether what counts is its sum over a sample; where a sample is cut, the values of what is cut off
    are added to the last learned token that stays.
    """

    dtype: type[np.number[Any]]
    default: float = 0.0
    summed: bool = False


COLUMNS = {
    "logprobs": Column(np.float32),
    "advantages": Column(np.float32),
    "rewards": Column(np.float32, summed=True),
    "side": Column(np.int8),
    "reference_logps": Column(np.float32),
    "number": Column(np.int32),
    "reference_logprobs": Column(np.float32),
    "teacher_logprobs": Column(np.float32),
    TARGETS: Column(np.int32),
    WEIGHTS: Column(np.float32),
    EXPERTS: Column(np.int16, UNKNOWN_EXPERT),
}
"""All columns: what the sampler gave each token, how much better an answer is than others, and, in the place
of that, the rewards from which the trainer computes it. Of preferences, with one value for all tokens of a
sample: `side`, 1 of the chosen answer, -1 of the rejected one, 0 of one that is not learned from, and the
logprob of its learned tokens together under the reference. `number`: the sample's place among those that are
scored one by one.
`reference_logprobs`, `teacher_logprobs`: what a served reference or teacher gives each token.
`targets`, `weights`: of clients of the service, which say for each token which one is scored in its place,
and what its logprob counts for.
`experts`: those that each token passed through in the server, counted from 0 in each layer; it alone has
several values for each token, [T, layers, experts of a token].

A further one needs an entry here and somebody who fills it in; batch files, packing and losses then have it.
Samples need not have all columns, but those of one batch have the same ones.
"""


class BadBatch(UsageError):
    """A batch's file can't be trained on; the message names it and says what to do."""


@dataclass(frozen=True)
class Sampling:
    """How a batch's answers were sampled, so that the loss computes logprobs of the same distribution.

    temperature: what logits were divided by; finite and above 0. The distribution is over the whole
    vocabulary: an answer that was sampled from a part of it (top-p, top-k) can't be in a batch.
    """

    temperature: float

    def __post_init__(self) -> None:
        if isinstance(self.temperature, bool) or not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature!r}")


FROM_TEXT = Sampling(temperature=1.0)
"""For records that nobody sampled, as in SFT: their loss is that of the model's own distribution."""


@dataclass(frozen=True)
class Piece:
    """Some tokens of a sample.

    sampled: for each column, the values of all tokens or one for all; None for tokens that are not learned.
    """

    token_ids: Sequence[int]
    sampled: "dict[str, float | Sequence[float]] | None" = None


@dataclass
class Sample:
    """One sequence of T tokens to learn from.

    token_ids: int32 [T]. loss_mask: bool [T], which tokens are learned. columns: by name, [T] each
    (`experts`: [T, layers, experts of a token]), of the data types in `COLUMNS`.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := self.columns.keys() - COLUMNS.keys():
            raise ValueError(f"{min(unknown)!r} is no column of samples; there are {', '.join(COLUMNS)}")

    @classmethod
    def of_answer(
        cls, prompt_ids: Sequence[int], answer_ids: Sequence[int], **columns: float | Sequence[float]
    ) -> "Sample":
        """A prompt and the answer to it, which is learned.

        Args:
            columns: values for the answer's tokens, or one for all of them.
        """
        start, length = len(prompt_ids), len(prompt_ids) + len(answer_ids)
        filled: dict[str, np.ndarray] = {}
        for name, values in columns.items():
            filled[name] = np.full(length, COLUMNS[name].default, COLUMNS[name].dtype)
            filled[name][start:] = values
        token_ids = np.array([*prompt_ids, *answer_ids], np.int32)
        return cls(token_ids, np.arange(length) >= start, filled)

    @classmethod
    def of_pieces(cls, pieces: Sequence["Piece"]) -> "Sample":
        """Pieces one after the other, of which those that were sampled are learned.

        Raises:
            ValueError: sampled pieces have different columns.
        """
        lengths = [len(piece.token_ids) for piece in pieces]
        names = {tuple(sorted(piece.sampled)) for piece in pieces if piece.sampled is not None}
        if len(names) > 1:
            raise ValueError(f"pieces of one sample have different columns: {sorted(names)}")
        filled = {
            name: np.full(sum(lengths), COLUMNS[name].default, COLUMNS[name].dtype)
            for name in max(names, default=())
        }
        loss_mask = np.zeros(sum(lengths), np.bool_)
        start = 0
        for piece, length in zip(pieces, lengths, strict=True):
            if piece.sampled is not None:
                loss_mask[start : start + length] = True
                for name, values in piece.sampled.items():
                    filled[name][start : start + length] = values
            start += length
        token_ids = np.concatenate([np.asarray(piece.token_ids, np.int32) for piece in pieces])
        return cls(token_ids, loss_mask, filled)

    def unlearned(self) -> "Sample":
        """The same tokens, of which none is learned."""
        return Sample(self.token_ids, np.zeros_like(self.loss_mask), self.columns)

    def cut(self, length: int) -> "Sample":
        """The first `length` tokens."""
        if len(self.token_ids) <= length:
            return self
        loss_mask = self.loss_mask[:length]
        columns = {name: values[:length] for name, values in self.columns.items()}
        learned = np.flatnonzero(loss_mask)
        for name in columns:
            if COLUMNS[name].summed and len(learned):
                columns[name] = columns[name].copy()
                columns[name][learned[-1]] += self.columns[name][length:].sum()
        return Sample(self.token_ids[:length], loss_mask, columns)


def columns_of(samples: Iterable[Sample]) -> list[str]:
    """The names of the samples' columns, in the order of `COLUMNS`.

    Raises:
        ValueError: they don't all have the same ones.
    """
    kinds = {tuple(name for name in COLUMNS if name in sample.columns) for sample in samples}
    if len(kinds) > 1:
        found = " and ".join(sorted(", ".join(names) or "none" for names in kinds))
        raise ValueError(f"the samples of a batch have the same columns, and here are some with {found}")
    return list(*kinds)


@dataclass
class Batch:
    """One optimiser step's samples, and how they were sampled.

    metrics: for the step's row in metrics.jsonl. together: so many samples in a row are a unit, such as the
    two of a pair: they stay in one micro-batch, and count as one record. position: JSON, where whoever made
    the batch goes on behind it; saved with the step. scored: samples that the task scores before the step,
    and does not learn from.
    """

    samples: Sequence[Sample]
    metrics: dict[str, float] = field(default_factory=dict)
    sampling: Sampling = field(kw_only=True)
    together: int = field(default=1, kw_only=True)
    position: dict[str, Any] | None = field(default=None, kw_only=True)
    scored: list[Sample] = field(default_factory=list[Sample], kw_only=True)

    def __post_init__(self) -> None:
        if len(self.samples) % self.together:
            raise ValueError(f"{len(self.samples)} samples are no whole units of {self.together}")

    def digest(self) -> str:
        """Names what is learned from: the ledger notes it when a batch is shipped, the trainer's row when it
        was trained on."""
        return digest_of((*self.samples, *self.scored))

    @property
    def columns(self) -> list[str]:
        """The names of its samples' columns; see `columns_of`."""
        return columns_of(self.samples)

    @property
    def loss_masks(self) -> Sequence[np.ndarray]:
        """Of each sample, which tokens are learned."""
        return [sample.loss_mask for sample in self.samples]

    def take(self, numbers: Sequence[int]) -> list[Sample]:
        """The samples of these numbers."""
        return [self.samples[number] for number in numbers]


def digest_of(samples: Iterable[Sample]) -> str:
    """Names the content of samples, in their order."""
    digest = hashlib.blake2b(digest_size=8)
    for sample in samples:
        digest.update(len(sample.token_ids).to_bytes(8, "little"))
        columns = (sample.columns[name] for name in COLUMNS if name in sample.columns)
        for values in (sample.token_ids, sample.loss_mask, *columns):
            digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


@dataclass
class RLBatch(Batch):
    """A batch that an orchestrator ships: its header says which step of which run it is for."""

    header: BatchHeader = field(kw_only=True)


def batch_files(folder: Path) -> list[tuple[int, Path]]:
    """The batches in a folder, each with its step, oldest first."""
    found = ((BATCH_NAME.fullmatch(path.name), path) for path in entries(folder, ".safetensors"))
    return sorted((int(match[1]), path) for match, path in found if match)


def batch_path(folder: Path, step: int) -> Path:
    """Where the batch of optimiser step `step` lies."""
    return folder / f"step_{step}.safetensors"


def write_batch(path: Path, batch: RLBatch) -> None:
    """Write a batch; readers see it whole or not at all."""
    samples = batch.samples
    tensors: dict[str, np.ndarray] = {
        "lengths": np.array([len(sample.token_ids) for sample in samples], dtype=np.int32),
        "token_ids": np.concatenate([sample.token_ids for sample in samples]).astype(np.int32),
        "loss_mask": np.concatenate([sample.loss_mask for sample in samples]).astype(np.bool_),
    }
    for name in columns_of(samples):
        values = np.concatenate([sample.columns[name] for sample in samples])
        tensors[name] = values.astype(COLUMNS[name].dtype)
    parts = {"metrics": batch.metrics, "info": batch.header.to_json(), "sampling": asdict(batch.sampling)}
    metadata = {name: json.dumps(part) for name, part in parts.items()}
    metadata["content"] = batch.digest()
    metadata["samples"] = "".join(digest_of([sample]) for sample in samples)
    metadata["index"] = _index_digest(metadata, tensors["lengths"], tensors["loss_mask"])
    metadata["digest"] = _file_digest(metadata["content"], metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, save(tensors, metadata=metadata), durable=True)


def read_origin(path: Path) -> tuple[Any, Any]:
    """The run and the branch that a batch's file says it belongs to, whichever version of Cairn wrote it.

    Raises:
        FileNotFoundError: there is no such batch yet.
        DamagedFile: it is not as it was written.
    """
    if not appears(path):
        raise FileNotFoundError(path)
    with _damage_named(path):
        info = _object(_read(path, tensors=False)[0].get("info", "{}"))
        return info.get("run_id"), info.get("branch")


def read_batch(path: Path) -> RLBatch:
    """Read what `write_batch` wrote.

    Raises:
        FileNotFoundError: there is no such batch yet.
        BadBatch: it doesn't say how its answers were sampled, or in a way that the loss doesn't know.
        DamagedFile: it is not as it was written.
    """
    if not appears(path):
        raise FileNotFoundError(path)
    with _damage_named(path):
        metadata, tensors = _read(path)
        ends = np.cumsum(tensors.pop("lengths"))[:-1]
        names = ["token_ids", "loss_mask"]
        names += sorted(tensors.keys() - set(names))
        token_ids, loss_masks, *columns = (np.split(tensors[name], ends) for name in names)
        samples = [
            Sample(ids, mask, dict(zip(names[2:], values, strict=True)))
            for ids, mask, *values in zip(token_ids, loss_masks, *columns, strict=True)
        ]
        batch = Batch(samples, _object(metadata["metrics"]), sampling=FROM_TEXT)
        if metadata.get("digest", wanted := _file_digest(batch.digest(), metadata)) != wanted:
            raise ValueError("its content is not what was written")
    sampling = _sampling(path, metadata.get("sampling", "nothing"))
    with _damage_named(path):
        header = BatchHeader.from_json(metadata["info"])
    return RLBatch(samples, batch.metrics, sampling=sampling, header=header)


@dataclass
class BatchInFile(RLBatch):
    """A batch whose samples are read from its file when they are asked for; `take` reads several at once."""

    samples: "SamplesInFile" = field()  # pyright: ignore[reportIncompatibleVariableOverride] # never replaced
    named: str = field(kw_only=True)
    """Its digest, as the file has it."""

    def digest(self) -> str:
        return self.named

    @property
    def columns(self) -> list[str]:
        return self.samples.columns

    @property
    def loss_masks(self) -> Sequence[np.ndarray]:
        return self.samples.loss_masks

    def take(self, numbers: Sequence[int]) -> list[Sample]:
        """The samples of these numbers.

        Raises:
            DamagedFile: one is not as it was written.
        """
        return self.samples.take(numbers)


class SamplesInFile(Sequence[Sample]):
    """The samples of a batch's file, of which only the masks are in memory.

    Args:
        digests: of each sample, as the file's index has them.
    """

    def __init__(self, path: Path, loss_masks: Sequence[np.ndarray], columns: list[str], digests: list[str]):
        self.columns = columns
        self.loss_masks = loss_masks
        self._path = path
        self._ends = np.cumsum([len(mask) for mask in loss_masks]).tolist()
        self._digests = digests

    def __len__(self) -> int:
        return len(self.loss_masks)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        numbers = range(len(self))[index]
        return self.take([numbers])[0] if isinstance(numbers, int) else self.take(numbers)

    def take(self, numbers: Sequence[int]) -> list[Sample]:
        """The samples of these numbers, each compared with its digest.

        Raises:
            DamagedFile: one is not as it was written.
        """
        found: list[Sample] = []
        with _damage_named(self._path):
            opened: Any = safe_open(self._path, framework="numpy")  # safetensors has no types for it
            with opened as file:
                names = ["token_ids", *self.columns]
                tensors = {name: file.get_slice(name) for name in names}
                for number in numbers:
                    mask = self.loss_masks[number]
                    start, end = self._ends[number] - len(mask), self._ends[number]
                    token_ids, *columns = (tensors[name][start:end] for name in names)
                    sample = Sample(token_ids, mask, dict(zip(self.columns, columns, strict=True)))
                    if digest_of([sample]) != self._digests[number]:
                        raise ValueError(f"sample {number} is not what was written")
                    found.append(sample)
        return found


def open_batch(path: Path) -> RLBatch:
    """Read the index of what `write_batch` wrote: all but tokens and columns, which are read when needed.

    Raises:
        FileNotFoundError, BadBatch, DamagedFile: as `read_batch` does.
    """
    if not appears(path):
        raise FileNotFoundError(path)
    with _damage_named(path):
        opened: Any = safe_open(path, framework="numpy")  # safetensors has no types for it
        with opened as file:
            metadata: dict[str, str] = file.metadata() or {}
            if "index" not in metadata:  # an earlier version wrote it
                return read_batch(path)
            names: list[str] = file.keys()
            lengths, loss_mask = (file.get_tensor(name) for name in ("lengths", "loss_mask"))
        if metadata["index"] != _index_digest(metadata, lengths, loss_mask):
            raise ValueError("its index is not what was written")
        masks = np.split(loss_mask, np.cumsum(lengths)[:-1])
        digests = [metadata["samples"][16 * i : 16 * i + 16] for i in range(len(masks))]
        samples = SamplesInFile(path, masks, [name for name in COLUMNS if name in names], digests)
        metrics, header = _object(metadata["metrics"]), BatchHeader.from_json(metadata["info"])
    sampling = _sampling(path, metadata.get("sampling", "nothing"))
    return BatchInFile(samples, metrics, sampling=sampling, header=header, named=metadata["content"])


def _read(path: Path, *, tensors: bool = True) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """What a safetensors file says beside its tensors, and these if they are wanted."""
    opened: Any = safe_open(path, framework="numpy")  # safetensors has no types for it
    with opened as file:
        names = file.keys() if tensors else ()
        return file.metadata() or {}, {name: file.get_tensor(name) for name in names}


@contextlib.contextmanager
def _damage_named(path: Path) -> Generator[None]:
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedFile(
            f"{path}: is no batch, or a damaged one ({error}); --ckpt.resume auto makes it again from the "
            "answers in the ledger"
        ) from None


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError(f"{text[:20]} is no JSON object")
    return cast(dict[str, Any], value)


def _file_digest(samples: str, metadata: dict[str, str]) -> str:
    """Of all that a batch file holds, so that damage is found."""
    parts = [samples, *(f"{name}={metadata.get(name)}" for name in ("metrics", "info", "sampling"))]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _index_digest(metadata: dict[str, str], lengths: np.ndarray, loss_mask: np.ndarray) -> str:
    """Of all that is read of a batch file before any sample is."""
    named = ("content", "samples", "metrics", "info", "sampling")
    digest = hashlib.blake2b("\n".join(metadata[name] for name in named).encode(), digest_size=8)
    for values in (lengths, loss_mask):
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def _sampling(path: Path, found: str) -> Sampling:
    try:
        return Sampling(**json.loads(found))
    except (TypeError, ValueError):
        raise BadBatch(
            f"{path} must say at which temperature its answers were sampled, and nothing else about it, but "
            f"says {found}: another version of Cairn wrote it. Without that the policy loss would be wrong. "
            f"Remove {path.parent}: its answers are in the ledger, and the batches are made again from there"
        ) from None
