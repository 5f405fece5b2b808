"""Logprobs under the weights that a run began with: computed once, before the first step, and kept.

They lie in the run directory, in files of a fixed number of records each, so that whoever is killed in the
middle goes on behind the last file, and a run that resumes trains with the very same numbers. The folder's
name stands for all that the numbers depend on: records, weights, tokenizer and settings. The weights are
loaded a second time for it, as a frozen copy (`frozen/model.py`), and dropped again; that takes less
memory than training does.
"""

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from cairn.checkpoint.checksums import FileChecksum
from cairn.config.trainer import TrainerBase
from cairn.run import heartbeat
from cairn.run.batches import FROM_TEXT, Batch, Sample
from cairn.run.errors import UsageError
from cairn.run.faults import fault_point
from cairn.run.files import write_atomic
from cairn.trainer.backends.fsdp2 import reshard
from cairn.trainer.frozen.model import Frozen
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import LossInputs
from cairn.trainer.losses.preferences import POINT, Answers
from cairn.trainer.packing import RankBatch, make_rank_batch
from cairn.trainer.scoring.tokens import Scorer, scoring
from cairn.trainer.state import TrainerState

logger = logging.getLogger(__name__)

CHUNK = 1024
"""Records of a file."""

Samples = Callable[[Sequence[int]], Sequence[Sequence[Sample]]]
"""The samples of each record, equally many."""


@dataclass(frozen=True)
class ReferenceWeights:
    """The weights of a reference: the Hugging Face directory that they are in, and a digest of its files."""

    folder: str
    digest: str

    @classmethod
    def of(cls, folder: Path, group: RankGroup) -> "ReferenceWeights":
        """Of this folder; all ranks call it, and one reads."""
        digest = _digest_of_weights(folder) if group.rank == 0 else ""
        return cls(str(folder.absolute()), group.gather_objects(digest)[0])

    def check(self, group: RankGroup) -> None:
        """See that the weights are there still; all ranks call it.

        Raises:
            UsageError: they are not.
        """
        folder = Path(self.folder)
        there = all(group.gather_objects((folder / "config.json").exists()))
        if not there or ReferenceWeights.of(folder, group) != self:
            raise UsageError(
                f"the reference's logprobs of some records have to be computed, and {folder}, which held the "
                f"weights that the run began with, {'holds others now' if there else 'is gone'}. Put them "
                "back, or begin a new run from the checkpoint's weights, which are then the reference: "
                "--model.name STEP with another --output-dir"
            )


def _digest_of_weights(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        checksum = FileChecksum.read(path)
        digest.update(json.dumps([path.name, checksum.size, checksum.chunks()]).encode())
    return digest.hexdigest()


def reference_logps(
    place: Path,
    about: Mapping[str, Any],
    origin: ReferenceWeights,
    state: TrainerState,
    samples: Samples,
    records: int,
    asked_to_stop: Callable[[], bool],
) -> np.ndarray | None:
    """The logprob of each sample's learned tokens under the weights in `origin`: float32 [records, k].

    What `place` has of them is read, and the rest is computed and put there. All ranks call it.

    Args:
        place: folder for the numbers of all references.
        about: what the numbers depend on beside the weights and the trainer's settings.
        samples: of records, by their numbers.
        asked_to_stop: whether to give up, asked from time to time.

    Returns:
        None if one of the ranks was asked to stop.

    Raises:
        UsageError: a number is not finite, or the weights are no longer there.
    """
    config, group = state.config, state.group
    precision = config.precision.settled(gpu=group.device.type == "cuda")
    settings = {"seq_len": config.seq_len, "precision": precision.model_dump(), "chunk": CHUNK}
    key = json.dumps({**about, "weights": origin.digest, "settings": settings}, sort_keys=True)
    folder = place / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    starts = range(0, records, CHUNK)
    files = {start: folder / f"records_{start}.safetensors" for start in starts}
    found = {start: _read(path) for start, path in files.items() if path.exists()}
    kept = {start for start, values in found.items() if values is not None}
    missing = [start for start in starts if not all(start in one for one in group.gather_objects(kept))]
    if missing:
        origin.check(group)
        logger.info(
            "computing the reference's logprobs of %d of %d files of records", len(missing), len(starts)
        )
        if group.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / "about.json", key.encode())
        with _reference(Path(origin.folder), state) as scorer:
            for start in missing:
                if group.any_of(asked_to_stop())[0]:
                    return None
                numbers = range(start, min(start + CHUNK, records))
                doing = f"computing the reference's logprobs of records {start} to {numbers[-1]}"
                heartbeat.doing(doing)
                values = _score(scorer, samples(numbers), config, group, doing)
                if not np.isfinite(values).all():
                    bad = numbers[int(np.argwhere(~np.isfinite(values))[0][0])]
                    raise UsageError(
                        f"the reference gives record {bad} (counted from 0) a logprob that is not finite"
                    )
                if group.rank == 0:
                    write_atomic(files[start], _to_bytes(values), durable=True)
                    fault_point("reference.written")
                found[start] = values
        del scorer
        if group.device.type == "cuda":
            torch.cuda.empty_cache()
    group.barrier()
    return np.concatenate([_present(found[start]) for start in starts])


@contextlib.contextmanager
def _reference(folder: Path, state: TrainerState) -> Iterator[Scorer]:
    """What scores with the weights in `folder`: the policy itself if it can, else a copy of them."""
    heartbeat.doing("loading the reference")
    as_begun = state.policy.as_begun(folder)
    if as_begun is None:
        yield Frozen(folder, state.config, state.group, whose="the reference", policy=state.scorer).scorer
        return
    logger.info("the reference is the policy itself, as the run began with it")
    model = state.scorer.model
    was_training = model.training
    try:
        model.eval()
        with as_begun:
            yield state.scorer
    finally:
        model.train(was_training)


def _present(values: np.ndarray | None) -> np.ndarray:
    assert values is not None
    return values


@torch.no_grad()
def _score(
    scorer: Scorer, units: Sequence[Sequence[Sample]], config: TrainerBase, group: RankGroup, doing: str
) -> np.ndarray:
    """Sums of logprobs by unit and sample, on all ranks: float32 [units, samples of each]."""
    samples = list(_numbered(units))
    batch = make_rank_batch(
        Batch(samples, sampling=FROM_TEXT),
        config,
        rank=group.layout.data.rank,
        world_size=group.layout.data.size,
        arrange=scorer.rows.arrange,
    )
    mine: list[tuple[list[int], list[float]]] = []
    for micro in batch.micros:
        heartbeat.doing(f"{doing}, micro-batch {micro.index}")
        micro = micro.to(group.device)
        inputs = LossInputs.of(scorer.logprobs(micro, batch.temperature), micro)
        which = micro.units.flatten()
        sums = inputs.sum_by_sample(inputs.logprobs)[which]
        mine.append((inputs.of_samples("number")[which].tolist(), sums.tolist()))
    reshard(scorer.model)
    values = np.full(len(samples), math.nan, np.float32)
    for of_rank in group.gather_objects(mine):
        for numbers, sums in of_rank:
            values[numbers] = sums
    return values.reshape(len(units), -1)


def _numbered(units: Sequence[Sequence[Sample]]) -> Iterator[Sample]:
    for number, sample in enumerate(sample for unit in units for sample in unit):
        yield Sample(
            sample.token_ids, sample.loss_mask, {"number": np.full(len(sample.token_ids), number, np.int32)}
        )


def _to_bytes(values: np.ndarray) -> bytes:
    return save({"logps": values}, metadata={"digest": _digest(values)})


def _digest(values: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).hexdigest()


def _read(path: Path) -> np.ndarray | None:
    """What a file holds; None if it is damaged, so that it is computed again."""
    try:
        opened: Any = safe_open(path, framework="numpy")  # safetensors has no types for it
        with opened as file:
            values: np.ndarray = file.get_tensor("logps")
            if file.metadata()["digest"] == _digest(values):
                return values
    except (OSError, SafetensorError, KeyError, TypeError):
        pass
    logger.warning("%s is damaged: its logprobs are computed again", path)
    return None


def kept_origin(recipe: Mapping[str, Any] | None) -> ReferenceWeights | None:
    """The origin that a checkpoint's recipe names."""
    kept = (recipe or {}).get("reference")
    return ReferenceWeights(**kept) if kept else None


def to_recipe(origin: ReferenceWeights) -> dict[str, str]:
    """The origin, as recipes have it."""
    return asdict(origin)


def add_reference_point(batch: RankBatch, scorer: Scorer, group: RankGroup) -> None:
    """Add a column with the mean log-ratio of the samples that are scored, or 0 if it is below; one number.

    All ranks call it. The number is of the whole batch: it is summed in the order of micro-batches, whatever
    rank they run on. Samples without a learned token count nothing.
    """
    found: list[torch.Tensor] = []
    with scoring(scorer):
        for micro in batch.scored:
            micro = micro.to(group.device)
            inputs = LossInputs.of(scorer.logprobs(micro, batch.temperature), micro)
            counts = inputs.lengths > 0
            ratios = Answers.of(inputs, with_reference=True).ratio.double()
            found.append(torch.stack([torch.where(counts, ratios, 0.0).sum(), counts.sum().double()]))
    table = group.gather_micros(torch.stack(found))  # [micro-batch, 2]
    total, count = table.cumsum(0)[-1].tolist()
    point = max(total / max(count, 1), 0.0)
    for micro in batch.micros:
        micro.columns[POINT] = torch.full(micro.input_ids.shape, point)  # float32, also of first tokens
