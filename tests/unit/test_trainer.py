"""The trainer's parts: packing, losses, one step, the learning rate, and records to samples."""

import itertools
import json
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_rank import one_rank
from safetensors.torch import load_file
from templates import write_chat
from tiny import random_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from cairn.checkpoint.tensors.sharded_files import read_tensors
from cairn.config.optimizer import SchedulerConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import SFTConfig, SFTDataConfig
from cairn.policy.receiver import read_source
from cairn.run.batches import (
    FROM_TEXT,
    Batch,
    RLBatch,
    Sample,
    SamplesInFile,
    Sampling,
    open_batch,
    write_batch,
)
from cairn.run.data_sets import BadRecord
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.messages import Attempt, BatchHeader, ShippedBatch
from cairn.trainer.data import batches
from cairn.trainer.data.batches import SFTData
from cairn.trainer.data.rendering import Encoder
from cairn.trainer.group import RankGroup
from cairn.trainer.loop import Prefetch
from cairn.trainer.losses import Likelihood, Loss, LossInputs, LossSums
from cairn.trainer.losses.ppo_clip import PPOClip
from cairn.trainer.models.model import build_model, weights
from cairn.trainer.models.trained import Trained
from cairn.trainer.optimizers import make_optimizer
from cairn.trainer.packing import (
    PAIR,
    Arrange,
    BatchCounts,
    MicroBatch,
    group_rows,
    make_micro_batches,
    make_rank_batch,
    one_a_row,
    pack,
    shared_rows,
    work_of,
)
from cairn.trainer.publishing.publisher import TRANSPORTS, VersionPublisher
from cairn.trainer.publishing.transports import FileTransport, NetworkTransport, Served
from cairn.trainer.spikes import TrainingDiverged
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import train_step

group = one_rank

LIKELIHOOD = Likelihood()
MODEL = Path(__file__).parents[2] / "configs" / "reverse_text" / "model"

# Packing

LENGTHS = st.lists(st.integers(1, 16), min_size=1, max_size=40)


def make_samples(lengths: list[int]) -> list[Sample]:
    """Samples whose tokens tell where they come from: token j of sample i is 100 (i + 1) + j."""
    return [
        Sample(
            token_ids=np.arange(n, dtype=np.int32) + 100 * (i + 1),
            loss_mask=np.arange(n) % 3 != 1,
            columns={
                "logprobs": -(np.arange(n, dtype=np.float32) + i),
                "advantages": np.full(n, i + 1, np.float32),
            },
        )
        for i, n in enumerate(lengths)
    ]


@given(LENGTHS, st.integers(16, 40))
def test_every_sample_gets_into_one_row_that_has_room(lengths: list[int], row_length: int):
    """And if the rows were filled one by one, at most one would stay half empty."""
    rows = pack(lengths, row_length)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert max(filled) <= row_length
    assert (len(rows) - 1) * row_length < 2 * sum(lengths)


@given(st.lists(st.integers(1, 32), min_size=1, max_size=40), st.integers(32, 64))
def test_no_more_rows_are_filled_than_by_first_fit(lengths: list[int], row_length: int):
    """The longest first, each into the first row that has room."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        row = next((number for number, free in enumerate(room) if free >= length), None)
        if row is None:
            row = len(room)
            room.append(row_length)
        room[row] -= length
    assert len(pack(lengths, row_length)) == len(room)


@given(st.lists(st.integers(1, 8), min_size=30, max_size=60), st.integers(40, 64))
def test_rows_are_filled_evenly(lengths: list[int], row_length: int):
    """They differ by no more than the longest sample."""
    filled = [sum(lengths[i] for i in row) for row in pack(lengths, row_length)]
    assert max(filled) - min(filled) <= max(lengths)


def test_rows_are_as_short_as_samples_allow():
    """And more of them share a micro-batch, which has as many tokens in all; the last is not a small rest."""
    size = {"row_length": 512, "rows_each": 2, "rank": 0, "world_size": 1}
    short = make_micro_batches(make_samples([16] * 68), **size)
    assert [tuple(micro.input_ids.shape) for micro in short] == [(8, 64), (9, 64)]
    mixed = make_micro_batches(make_samples([300, *[16] * 60]), **size)
    assert [micro.input_ids.shape[1] for micro in mixed] == [300, 240]
    long = make_micro_batches(make_samples([512, 400, 300]), **size)
    assert [tuple(micro.input_ids.shape) for micro in long] == [(1, 512), (2, 400)]


@given(
    LENGTHS,
    st.integers(16, 40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([shared_rows, one_a_row]),
)
def test_samples_that_belong_together_are_in_one_micro_batch(
    lengths: list[int], row_length: int, rows_each: int, world_size: int, arrange: Arrange
):
    """However they are laid in rows; `units` names them in their order, and nothing is lost."""
    samples = make_samples([*lengths, *reversed(lengths)])
    found = []
    for rank in range(world_size):
        for micro in make_micro_batches(
            samples,
            row_length=row_length,
            rows_each=rows_each,
            rank=rank,
            world_size=world_size,
            arrange=arrange,
            together=2,
        ):
            assert micro.input_ids.numel() <= max(row_length * rows_each, 2 * row_length)
            firsts = micro.input_ids.flatten()[micro.bounds[:-1].long()]
            found += [[int(firsts[i]) // 100 - 1 for i in unit] for unit in micro.units.tolist()]
    assert sorted(found) == [[i, i + 1] for i in range(0, len(samples), 2)]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.integers(60, 100),
    st.none() | st.integers(2, 90),
    st.integers(1, 8),
    st.sampled_from([1, 2]),
    st.sampled_from([shared_rows, one_a_row]),
)
def test_ranks_are_filled(
    lengths: list[int], row_length: int, tokens: int | None, ranks: int, together: int, arrange: Arrange
):
    """Each sample is in one micro-batch with those that belong to it, none of which has more than
    `micro_batch_tokens` unless it is one unit, and no rank is without one where there are rows enough."""
    lengths = lengths * together
    how = {"row_length": row_length, "rows_each": 1, "tokens": tokens, "arrange": arrange}
    groups = group_rows(lengths, **how, together=together, ranks=ranks)
    of_groups = [sorted(i for row in group for i in row) for group in groups]
    assert sorted(itertools.chain.from_iterable(of_groups)) == list(range(len(lengths)))
    for numbers, group in zip(of_groups, groups, strict=True):
        assert {i // together for i in numbers} == {i // together for i in numbers[::together]}
        padded = len(group) * max(sum(lengths[i] for i in row) for row in group)
        assert padded <= max(tokens or 0, row_length * together) or len(numbers) == together
    if len(groups) % ranks:
        longest = tokens or row_length * together
        assert all(len(g) <= together or sum(lengths[i] for r in g for i in r) > longest for g in groups)
    work, room = work_of(groups, lengths, ranks)
    assert 0 < work <= room * (1 + 1e-9)
    assert work == pytest.approx(sum(n + PAIR * n * n for n in lengths))


DRAW = random.Random(1)
REASONED = [min(32_768, int(8000 * math.exp(DRAW.gauss(0, 0.8)))) for _ in range(512)]


@pytest.mark.parametrize(
    ("lengths", "ranks", "before", "now"),
    [([2048] * 64, 8, 0.5, 0.999), ([2048] * 256, 64, 0.25, 0.999), (REASONED, 32, 0.75, 0.85)],
    ids=["64 of 2k", "256 of 2k", "reasoning"],
)
def test_no_rank_waits_for_samples_that_others_have(
    lengths: list[int], ranks: int, before: float, now: float
):
    """With rows of 32,768 tokens."""
    how = {"row_length": 32_768, "rows_each": 1}
    busy = []
    for spread, tokens in ((1, None), (ranks, 8192)):
        work, room = work_of(group_rows(lengths, **how, tokens=tokens, ranks=spread), lengths, ranks)
        busy.append(work / room)
    assert busy[0] <= before
    assert busy[1] >= now


def test_a_micro_batch_has_one_size():
    assert SFTConfig(micro_batch_size=4, seq_len=100).pass_tokens == 400
    assert SFTConfig(micro_batch_tokens=8192, seq_len=32_768).pass_tokens == 8192
    with pytest.raises(ValueError, match="micro_batch_tokens = 64 and micro_batch_size = 2 both"):
        SFTConfig(micro_batch_tokens=64, micro_batch_size=2)


def test_parts_of_a_batch_are_made_of_whole_pairs():
    batch = Batch(make_samples([5] * 8), sampling=FROM_TEXT, together=2)
    config = TrainerConfig(seq_len=16)
    whole = make_rank_batch(batch, config, rank=0, world_size=1, mini_batches=2, updates=2)
    parts: list[list[int]] = []
    for part in whole.parts:
        starts = [(micro, micro.bounds[i]) for micro in part.micros for i in micro.units.flatten()]
        parts.append(sorted(int(micro.input_ids.flatten()[at]) // 100 - 1 for micro, at in starts))
    assert parts == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert whole.counts.records == 4
    with pytest.raises(ValueError, match="7 samples are no whole units of 2"):
        Batch(batch.samples[1:], sampling=FROM_TEXT, together=2)


def test_a_sample_that_is_longer_than_a_row():
    with pytest.raises(ValueError, match="17 tokens does not fit into a row of 16"):
        pack([3, 17], 16)


def columns(micro: MicroBatch) -> list[torch.Tensor]:
    """All tensors of a micro-batch."""
    return [micro.input_ids, micro.position_ids, micro.loss_mask, *micro.columns.values()]


@given(LENGTHS, st.integers(16, 40), st.integers(1, 4), st.integers(1, 4))
def test_the_ranks_micro_batches_are_those_of_one_rank(
    lengths: list[int], row_length: int, rows_each: int, world_size: int
):
    """Together, whatever their number; each has equally many, and what fills them up learns nothing."""
    samples = make_samples(lengths)
    size = {"row_length": row_length, "rows_each": rows_each}
    alone = make_micro_batches(samples, **size, rank=0, world_size=1)
    assert [micro.index for micro in alone] == list(range(len(alone)))
    shares = [
        make_micro_batches(samples, **size, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert len({len(share) for share in shares}) == 1
    for rank, share in enumerate(shares):  # summed up round by round, they are in order
        assert [micro.index for micro in share] == [rank + world_size * i for i in range(len(share))]
    together = sorted((micro for share in shares for micro in share), key=lambda micro: micro.index)
    assert [micro.index for micro in together] == list(range(len(together)))
    for a, b in zip(alone, together, strict=False):
        assert all(torch.equal(x, y) for x, y in zip(columns(a), columns(b), strict=True))
    for extra in together[len(alone) :]:
        assert not extra.loss_mask.any()


@given(LENGTHS, st.integers(16, 40), st.integers(1, 4))
def test_every_token_is_there_once_with_all_that_belongs_to_it(
    lengths: list[int], row_length: int, rows_each: int
):
    """In a run of positions from 0 on; only a sample's first token is never learned."""
    samples = make_samples(lengths)
    micros = make_micro_batches(samples, row_length=row_length, rows_each=rows_each, rank=0, world_size=1)
    seen = []
    for micro in micros:
        assert micro.input_ids.numel() <= row_length * rows_each
        for ids, positions, mask, logprobs, advantages in zip(*columns(micro), strict=True):
            starts = [place for place, position in enumerate(positions.tolist()) if position == 0]
            for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                assert positions[start:end].tolist() == list(range(end - start))
                if ids[start] == 0:  # padding
                    assert not ids[start:end].any()
                    assert not mask[start:end].any()
                    continue
                i = int(ids[start]) // 100 - 1
                seen.append(i)
                np.testing.assert_array_equal(ids[start:end], samples[i].token_ids)
                np.testing.assert_array_equal(mask[start + 1 : end], samples[i].loss_mask[1:])
                assert not mask[start]
                np.testing.assert_array_equal(logprobs[start:end], samples[i].columns["logprobs"])
                np.testing.assert_array_equal(advantages[start:end], samples[i].columns["advantages"])
    assert sorted(seen) == list(range(len(lengths)))


# One step of a real model


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_rank_reads_the_samples_of_its_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
):
    """Of a batch in a file, and makes of them what it makes of a batch in memory."""
    made = random_samples(3, [12, 5, 30, 7, 9, 20, 3, 11])
    version = "run:branch_1:0"
    header = BatchHeader(
        "run", "branch_1", "run:1", 1, version, [0], ShippedBatch(1, [[1, 1]], 8, 97, "digest", 0)
    )
    whole = RLBatch(made, sampling=Sampling(0.7), header=header)
    write_batch(tmp_path / "batch", whole)
    read: list[int] = []
    take = SamplesInFile.take

    def noted(self: SamplesInFile, numbers: Sequence[int]) -> list[Sample]:
        read.extend(numbers)
        return take(self, numbers)

    monkeypatch.setattr(SamplesInFile, "take", noted)
    for rank in range(world_size):
        how = {"rank": rank, "world_size": world_size, "mini_batches": 2}
        before = len(read)
        found, expected = (
            make_rank_batch(one, TrainerConfig(seq_len=24), **how)
            for one in (open_batch(tmp_path / "batch"), whole)
        )
        assert len(read) - before < 8 or world_size == 1
        assert (found.counts, found.digest, found.parts[0].lengths) == (
            *(expected.counts, expected.digest, expected.parts[0].lengths),
        )
        for micro, other in zip(found.micros, expected.micros, strict=True):
            assert micro.columns.keys() == other.columns.keys()
            for values, wanted in zip(columns(micro), columns(other), strict=True):
                assert torch.equal(values, wanted)
    assert sorted(read) == list(range(8))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 20,000 parameters, wide enough in its logits to tell contexts apart."""
    folder = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        **{"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 256,
        },
        **{"initializer_range": 0.2, "tie_word_embeddings": request.param},
    )
    random_model(config).save_pretrained(folder)
    return folder


Step = Callable[..., tuple[dict[str, float], dict[str, torch.Tensor]]]


@pytest.fixture
def step(group: RankGroup, model_folder: Path) -> Step:
    """`step(samples, loss, **config)`: metrics of one step, and the weights after it."""

    def run(
        samples: list[Sample],
        loss: Loss = LIKELIHOOD,
        temperature: float = 1.0,
        **changed: object,
    ):
        config = TrainerConfig(
            **{"optimizer": {"lr": 0.01, "max_grad_norm": 1e9, "eps": 1e-3}, "seq_len": 24, **changed}
        )
        model = build_model(model_folder, config, group)
        read_tensors(model_folder, weights(model), "model")
        policy = Trained(model, make_optimizer(model.named_parameters(), config.optimizer))
        state = TrainerState(config, group, {POLICY: policy}, TrainerProgress())
        work = make_rank_batch(Batch(samples, sampling=Sampling(temperature)), config, rank=0, world_size=1)
        row = train_step(state, work, 1, loss)
        tokens = sum(min(len(sample.token_ids), config.seq_len) for sample in samples)
        assert state.progress == TrainerProgress(1, tokens, len(samples))
        return row, {name: weight.clone() for name, weight in weights(model).items()}

    return run


class Reads(TorchDispatchMode):
    """Counts reads of single values, for each of which a host waits for its GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_step_reads_its_metrics_and_the_norm_at_once(step: Step):
    """After the last forward pass no value is read on its own, only the table of `gather_micros`."""

    class Counted(Likelihood):
        def __call__(self, inputs: LossInputs) -> LossSums:
            reads.count = 0
            return super().__call__(inputs)

    samples = [Sample(np.arange(5, 15, dtype=np.int32), np.ones(10, bool))] * 3
    with Reads() as reads:
        row, _ = step(samples, Counted(), seq_len=12)
    assert (reads.count, row["grad_norm"] > 0) == (0, True)


def test_a_published_version_is_the_model_also_when_it_is_written_over_an_old_one(
    group: RankGroup, model_folder: Path, tmp_path: Path
):
    run, attempt = RunDirectory(tmp_path), Attempt("abc", 1, "rl", 0, None, "main")
    model = Qwen3ForCausalLM.from_pretrained(model_folder)
    transport = FileTransport(group, Served(partial(weights, model), checked=False))
    publisher = VersionPublisher(run, attempt, group, transport, 0)
    inodes = []
    for step in range(1, 5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(step)
        publisher.publish(step, save=False, last=False)
        publisher.finish()
        assert run.versions.announced(attempt, step).version == step
        file = run.versions.folder(step) / "model.safetensors"
        inodes.append(file.stat().st_ino)
        published = load_file(file)
        assert published.keys() == weights(model).keys()
        assert all(torch.equal(published[name], weight) for name, weight in weights(model).items())
        run.versions.forget_before(step)  # leaves this one for whoever reads it
    assert inodes[2:] == inodes[:2]


def test_a_version_in_memory_is_where_the_living_trainer_is_and_the_last_one_is_a_file(
    group: RankGroup, model_folder: Path, tmp_path: Path
):
    run, attempt = RunDirectory(tmp_path), Attempt("abc", 1, "rl", 0, None, "main")
    model = Qwen3ForCausalLM.from_pretrained(model_folder)

    def publisher(step: int) -> VersionPublisher:
        transport = NetworkTransport(group, Served(partial(weights, model), checked=False))
        return VersionPublisher(run, attempt, group, transport, step)

    publishers = [publisher(0)]
    folders = [run.versions.folder(step) for step in range(3)]
    publishers[0].publish(1, save=False, last=False)
    publishers[0].finish()
    first = read_source(folders[1])
    publishers.append(publisher(1))
    second = read_source(folders[1])
    assert [source.step for source in (first, second)] == [1, 1]
    assert first.ranks[0].port != second.ranks[0].port
    assert first.shapes == {name: list(weight.shape) for name, weight in weights(model).items()}
    run.versions.forget_before(2)  # its folder is used again
    publishers[1].publish(2, save=False, last=True)
    assert [path.name for path in folders[2].iterdir()] == ["model.safetensors"]
    for each in publishers:
        each.close()


def test_every_transport_that_can_be_configured_exists():
    settings = ("weight_transport", "weight_encoding")
    choices = [get_args(TrainerConfig.model_fields[name].annotation) for name in settings]
    assert set(itertools.product(*choices)) == TRANSPORTS.keys()


def random_samples(seed: int, lengths: list[int]) -> list[Sample]:
    """Samples for both losses."""
    draw = np.random.default_rng(seed)
    return [
        Sample(
            token_ids=draw.integers(1, 101, n).astype(np.int32),
            loss_mask=draw.random(n) < 0.7,
            columns={
                "logprobs": -draw.random(n).astype(np.float32) * 9,
                "advantages": draw.normal(size=n).astype(np.float32),
            },
        )
        for n in lengths
    ]


def reference(folder: Path, samples: list[Sample]) -> torch.Tensor:
    """The mean loss of the learned tokens, each sample by itself, in transformers."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids).long()
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        mask = torch.from_numpy(sample.loss_mask)[1:]
        losses.append(-logprobs.gather(-1, ids[1:, None])[:, 0][mask])
    return torch.cat(losses).mean()


LAYOUTS = {
    "a sample a row, a row a micro-batch": {"seq_len": 12, "micro_batch_size": 1},
    "packed rows": {"seq_len": 24, "micro_batch_size": 2},
    "all in one row": {"seq_len": 200, "micro_batch_size": 1},
    "all in one micro-batch": {"seq_len": 24, "micro_batch_size": 64},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_step_is_the_same_however_it_is_cut_and_packed(step: Step, model_folder: Path, layout: dict):
    """Samples that share a row do not see each other, and every learned token counts the same."""
    samples = random_samples(1, [12, 9, 8, 12, 7, 3, 11, 2])
    expected = reference(model_folder, samples)
    row, found = step(samples, **layout)
    assert row["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert row["learned_tokens"] == sum(int(sample.loss_mask[1:].sum()) for sample in samples)
    plain_row, plain = step(samples, seq_len=12, micro_batch_size=1)
    assert row["grad_norm"] == pytest.approx(plain_row["grad_norm"], rel=1e-4)
    for name, weight in found.items():
        torch.testing.assert_close(weight, plain[name], atol=2e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_policy_step_is_the_same_however_it_is_cut_and_packed(step: Step, layout: dict):
    """All its metrics are, too."""
    samples = random_samples(2, [12, 9, 8, 12, 7, 3])
    loss = PPOClip()
    row, found = step(samples, loss, **layout)
    plain_row, plain = step(samples, loss, seq_len=12, micro_batch_size=1)
    assert 0.8 < row.pop("packing_efficiency") <= plain_row.pop("packing_efficiency") == 1
    assert row == pytest.approx(plain_row, rel=1e-3)
    assert 0 < row["ratio/clipped"] < 1
    for name, weight in found.items():
        torch.testing.assert_close(weight, plain[name], atol=2e-5, rtol=0)


class OfSamples(Likelihood):
    """A mean over samples instead of tokens; over fewer than there are, if told so."""

    def __init__(self, fewer: int = 0):
        self.fewer = fewer

    def normaliser(self, counts: BatchCounts) -> float:
        return counts.samples - self.fewer


def test_the_normaliser_is_the_losss_own(step: Step):
    """It scales the loss and its gradient; of nothing else does it change anything."""
    samples = random_samples(9, [12, 9, 8])
    row, _ = step(samples)
    other, _ = step(samples, OfSamples())
    scale = row["learned_tokens"] / len(samples)
    assert other["loss"] == pytest.approx(scale * row["loss"], rel=1e-6)
    assert other["grad_norm"] == pytest.approx(scale * row["grad_norm"], rel=1e-4)
    assert other["learned_tokens"] == row["learned_tokens"]
    with pytest.raises(UsageError, match="the normaliser of OfSamples is 0, and must be above 0"):
        step(samples, OfSamples(fewer=3))


def test_gradients_are_those_of_transformers(step: Step, model_folder: Path):
    """Their norm, how they are clipped, and where AdamW goes with them."""
    samples = random_samples(3, [12, 9, 8])
    model = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    ids = [torch.from_numpy(sample.token_ids).long() for sample in samples]
    count = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
    for sample, tokens in zip(samples, ids, strict=True):
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        (-(logprobs * torch.from_numpy(sample.loss_mask)[1:]).sum() / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0).step()
    limited = {"lr": 0.01, "max_grad_norm": 0.1, "eps": 1e-3}
    row, found = step(samples, optimizer=limited)
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert row["lr"] == 0.01
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.detach(), atol=2e-5, rtol=0)


def test_the_temperature_of_sampling_is_that_of_the_loss(step: Step, model_folder: Path):
    """With the sampler's own logprobs at that temperature there is no mismatch."""
    (sample,) = random_samples(4, [12])
    model = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    ids = torch.from_numpy(sample.token_ids).long()
    with torch.no_grad():
        logprobs = (model(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    sample.columns["logprobs"][1:] = logprobs.numpy()
    row, _ = step([sample], PPOClip(), 0.7)
    assert row["mismatch/logprob_max"] < 1e-5
    row, _ = step([sample], PPOClip())
    assert row["mismatch/logprob_max"] > 0.1


def test_the_entropy_bonus_is_that_of_the_model(step: Step, model_folder: Path):
    """Through FSDP2, value and gradient, over several micro-batches."""
    samples = random_samples(8, [12, 20, 9, 13])
    plain, _ = step(samples, PPOClip())
    row, _ = step(samples, PPOClip(entropy_coef=0.5))
    reported, _ = step(samples, PPOClip(entropy_coef=0))
    model = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    total, count, gains = 0.0, 0, torch.zeros(())
    for sample in samples:
        ids, mask = torch.from_numpy(sample.token_ids).long(), torch.from_numpy(sample.loss_mask)[1:]
        logits = model(ids[None]).logits[0, :-1]
        entropies = torch.distributions.Categorical(logits=logits).entropy()[mask]
        logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0][mask]
        sampler, advantages = (
            torch.from_numpy(sample.columns[name])[1:][mask] for name in ("logprobs", "advantages")
        )
        ratio = (logprobs - sampler).exp()
        objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        gains = gains + (objective + 0.5 * entropies).sum()
        total, count = total + entropies.sum().item(), count + int(mask.sum())
    (-gains / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert row["entropy"] == pytest.approx(total / count, rel=1e-5)
    assert row["loss"] == pytest.approx(plain["loss"] - 0.5 * total / count, rel=1e-4)
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert reported["entropy"] == pytest.approx(row["entropy"], rel=1e-6)
    assert reported["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)


def test_samples_that_are_too_long_are_cut_and_counted(step: Step, model_folder: Path):
    samples = random_samples(5, [12, 20, 9, 13])
    row, _ = step(samples, seq_len=12)
    assert row["cut_samples"] == 2
    expected = reference(model_folder, [sample.cut(12) for sample in samples])
    assert row["loss"] == pytest.approx(expected.item(), rel=1e-5)
    row, _ = step(samples, seq_len=20)
    assert "cut_samples" not in row


def test_a_gradient_that_is_not_finite_ends_training(step: Step):
    samples = random_samples(7, [12])
    samples[0].columns["advantages"][:] = np.nan
    with pytest.raises(TrainingDiverged, match="step 1: the gradient's norm is nan"):
        step(samples, PPOClip())


# The learning rate

SCHEDULERS = st.builds(
    SchedulerConfig,
    type=st.sampled_from(["constant", "linear", "cosine"]),
    warmup_steps=st.integers(0, 20),
    min_lr_ratio=st.floats(0, 1),
)


@given(SCHEDULERS, st.integers(21, 100))
def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_end(scheduler: SchedulerConfig, end: int):
    """In straight steps up; then never up again; and it stays where it ends."""
    rates = [scheduler.rate(step, 2.0, end) for step in range(1, end + 20)]
    warmup = scheduler.warmup_steps
    assert rates[:warmup] == pytest.approx([2.0 * (i + 1) / warmup for i in range(warmup)])
    after = rates[max(warmup - 1, 0) :]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    last = 2.0 if scheduler.type == "constant" else 2.0 * scheduler.min_lr_ratio
    assert rates[end - 1 :] == pytest.approx([last] * 20)


def test_half_way_down():
    """The linear and the cosine schedule cross in the middle."""
    for kind, quarter in (("linear", 0.75), ("cosine", (1 + math.cos(math.pi / 4)) / 2)):
        scheduler = SchedulerConfig(type=kind, warmup_steps=10)
        assert scheduler.rate(60, 1.0, 110) == pytest.approx(0.5)
        assert scheduler.rate(35, 1.0, 110) == pytest.approx(quarter)


# Records to samples


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    """One token a character; `<user>question<assistant>answer<eos>`."""
    return AutoTokenizer.from_pretrained(MODEL)


def turns(*texts: str) -> list[dict[str, str]]:
    """A conversation: user, assistant, user, ..."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def learned(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The whole text, and the same with dots for tokens that are not learned."""
    tokens = tokenizer.convert_ids_to_tokens(sample.token_ids.tolist())
    masked = [t if m else "." for t, m in zip(tokens, sample.loss_mask, strict=True)]
    return "".join(tokens), "".join(masked)


RECORDS = [
    ({"messages": turns("ab", "ba")}, "<user>ab<assistant>ba<eos>", "....ba<eos>"),
    (
        {"messages": turns("ab", "ba", "c", "c!")},
        "<user>ab<assistant>ba<eos><user>c<assistant>c!<eos>",
        "....ba<eos>...c!<eos>",
    ),
    ({"messages": turns("ab", "ba", "c")}, "<user>ab<assistant>ba<eos><user>c", "....ba<eos>.."),
    ({"messages": turns("ab")}, "<user>ab", "..."),
    ({"prompt": "ab", "completion": "ba"}, "abba<eos>", "..ba<eos>"),
    ({"prompt": "", "completion": "ba"}, "ba<eos>", "ba<eos>"),
    (
        {"prompt": turns("ab"), "completion": [{"role": "assistant", "content": "ba"}]},
        "<user>ab<assistant>ba<eos>",
        "....ba<eos>",
    ),
    (
        {"prompt": turns("x", "y", "ab"), "completion": [{"role": "assistant", "content": "ba"}]},
        "<user>x<assistant>y<eos><user>ab<assistant>ba<eos>",
        "........." + "ba<eos>",
    ),
    ({"messages": None, "prompt": "a", "completion": "b"}, "ab<eos>", ".b<eos>"),
    ({"messages": turns("ab", "ba"), "prompt": None}, "<user>ab<assistant>ba<eos>", "....ba<eos>"),
]


@pytest.mark.parametrize(("record", "text", "what"), RECORDS)
def test_what_the_assistant_says_is_learned(
    tokenizer: PreTrainedTokenizerBase, record: dict, text: str, what: str
):
    """With the end of its turn, and nothing else: neither questions nor an answer within a prompt."""
    assert learned(Encoder(tokenizer).whole([record], [0])[0], tokenizer) == (text, what)


def test_records_of_all_kinds_together(tokenizer: PreTrainedTokenizerBase):
    """Each gives what it gives alone, in their order."""
    samples = Encoder(tokenizer).whole([record for record, *_ in RECORDS], list(range(len(RECORDS))))
    assert [learned(sample, tokenizer) for sample in samples] == [(text, what) for _, text, what in RECORDS]


@pytest.mark.parametrize("record", [{"text": "ab"}, {"prompt": "ab"}, {"completion": "b"}])
def test_a_record_of_another_kind(tokenizer: PreTrainedTokenizerBase, record: dict):
    with pytest.raises(BadRecord, match=r"record 17: it has the fields .*; it needs messages, or prompt and"):
        Encoder(tokenizer).whole([record], [17])


FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if loop.last or m.role == 'user' else '-' }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Shows what was said last, and nothing of what was said before."""


def test_a_template_that_rewrites_earlier_turns_is_learned_turn_by_turn(
    tokenizer: PreTrainedTokenizerBase,
):
    """As those that drop earlier thoughts: each turn once, behind what a server would see."""
    tokenizer.chat_template = FORGETFUL
    assert (
        learned(Encoder(tokenizer).whole([{"messages": turns("a", "b")}], [3])[0], tokenizer)[1]
        == "....b<eos>"
    )
    record = {"messages": turns("a", "b", "c", "d", "e")}
    (samples,) = Encoder(tokenizer).turns([record], [3])
    assert [learned(sample, tokenizer) for sample in samples] == [
        ("<user>a<eos><assistant>b<eos>", "....b<eos>"),
        ("<user>a<eos><assistant>-<eos><user>c<eos><assistant>d<eos>", "." * 10 + "d<eos>"),
    ]
    asked = tokenizer.apply_chat_template(record["messages"][:3], add_generation_prompt=True)["input_ids"]
    assert samples[1].token_ids[: len(asked)].tolist() == asked
    with pytest.raises(BadRecord, match=r"record 3: the chat template renders earlier turns .* 2 samples"):
        Encoder(tokenizer).whole([record], [3])


def test_turns_that_stay_as_they_were_share_a_sample(tmp_path: Path):
    """Qwen3 keeps the thoughts of the answers to the last question: two samples teach three turns."""
    tokenizer = write_chat(tmp_path, "qwen3").tokenizer
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "first"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "", "reasoning_content": "second", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "d", "reasoning_content": "third"},
    ]
    (samples,) = Encoder(tokenizer).turns([{"messages": messages, "tools": '[{"name": "f"}]'}], [0])
    texts = [tokenizer.decode(sample.token_ids) for sample in samples]
    said = [tokenizer.decode(sample.token_ids[sample.loss_mask]) for sample in samples]
    assert len(samples) == 2
    assert "first" in said[0]
    assert "first" not in texts[1]
    assert [word in said[1] for word in ("second", '"x": 1', "third", "d<|im_end|>")] == [True] * 4
    assert all('{"name": "f"}' in text for text in texts), "the tools are shown"


def test_roles_and_flags_say_what_is_learned(tokenizer: PreTrainedTokenizerBase):
    """A message's own flag has precedence over its role's."""
    record = {"messages": turns("a", "b", "c", "d")}
    (sample,) = Encoder(tokenizer, roles=["user"]).whole([record], [0])
    assert learned(sample, tokenizer)[1] == "<user>a...<user>c..."
    for flag in ({"train": False}, {"weight": 0}):
        record["messages"][1] |= flag
        (sample,) = Encoder(tokenizer).whole([record], [0])
        assert learned(sample, tokenizer)[1] == "........d<eos>"
        record["messages"][1] = {"role": "assistant", "content": "b"}
    record["messages"][2]["train"] = True
    (sample,) = Encoder(tokenizer).whole([record], [0])
    assert learned(sample, tokenizer)[1] == "...b<eos><user>c.d<eos>"


def test_conversations_of_sharegpt_are_read(tokenizer: PreTrainedTokenizerBase):
    said = [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "ba"}]
    (sample,) = Encoder(tokenizer).whole([{"conversations": said}], [0])
    assert learned(sample, tokenizer) == ("<user>ab<assistant>ba<eos>", "....ba<eos>")


def test_tools_need_a_template_that_shows_them(tokenizer: PreTrainedTokenizerBase):
    """Silence about them would teach calls out of the blue."""
    with pytest.raises(BadRecord, match="record 4: it has tools, and the chat template takes no notice"):
        Encoder(tokenizer).whole([{"messages": turns("a", "b"), "tools": [{"name": "f"}]}], [4])
    called = [*turns("a"), {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    with pytest.raises(BadRecord, match="record 4: it has tool_calls, and the chat template takes no notice"):
        Encoder(tokenizer).whole([{"messages": called}], [4])


def test_messages_without_a_template(tokenizer: PreTrainedTokenizerBase):
    tokenizer.chat_template = None
    with pytest.raises(BadRecord, match="record 3: it has messages, and the tokenizer has no chat template"):
        Encoder(tokenizer).whole([{"messages": turns("a", "b")}], [3])
    Encoder(tokenizer).whole([{"prompt": "a", "completion": "b"}], [3])


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven records, with prompts a to g."""
    path = tmp_path_factory.mktemp("data") / "seven.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "completion": "x"}) + "\n" for p in "abcdefg"))
    return path


def prompts(data: SFTData, steps: int) -> str:
    """The prompts of the next batches."""
    ids = [int(s.token_ids[0]) for step in range(steps) for s in data.next_batch(step).samples]
    return "".join(data.tokenizer.convert_ids_to_tokens(ids))


@pytest.fixture(scope="module")
def datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of `datasets` that is not the user's."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.mark.usefixtures("datasets_cache")
def test_every_epoch_has_every_record_once(seven: Path, tokenizer: PreTrainedTokenizerBase):
    """Each in an order of its own that depends on the seed; batches go over the ends of epochs."""
    config = SFTDataConfig(name=str(seven), batch_size=5)
    taken = prompts(SFTData(config, tokenizer, 3, 0), 7)
    epochs = [taken[i : i + 7] for i in range(0, 35, 7)]
    assert [sorted(epoch) for epoch in epochs] == [list("abcdefg")] * 5
    assert len(set(epochs)) > 1
    assert prompts(SFTData(config, tokenizer, 4, 0), 7) != taken


@pytest.mark.usefixtures("datasets_cache")
@settings(max_examples=20)
@given(st.integers(0, 6))
def test_a_position_is_all_that_it_takes_to_go_on(seven: Path, done: int):
    """Whether it lies within an epoch or at its end."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = SFTDataConfig(name=str(seven), batch_size=5)
    data = SFTData(config, tokenizer, 3, 0)
    prompts(data, done)
    assert data.position == 5 * done
    assert prompts(SFTData(config, tokenizer, 3, data.position), 3) == prompts(data, 3)


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize(("room", "encoded"), [(1000, 7), (9, 3 + 5 * 4), (0, 35)])
def test_a_record_is_encoded_once_if_there_is_room_to_keep_it(
    seven: Path,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
    encoded: int,
):
    """Three tokens each; batches are the same whether records were kept or not."""
    config = SFTDataConfig(name=str(seven), batch_size=7)
    expected = [SFTData(config, tokenizer, 3, 7 * step).next_batch(step).digest() for step in range(5)]
    asked: list[int] = []

    class Counting(Encoder):
        def turns(self, records: Any, indices: Any, where: Any = str) -> list[list[Sample]]:
            asked.extend(indices)
            return super().turns(records, indices, where)

    monkeypatch.setattr(batches, "CACHED_TOKENS", room)
    monkeypatch.setattr(batches, "Encoder", Counting)
    data = SFTData(config, tokenizer, 3, 0)
    assert [data.next_batch(step).digest() for step in range(5)] == expected
    assert len(asked) == encoded


@pytest.mark.usefixtures("datasets_cache")
def test_without_shuffling_the_files_order_stays(seven: Path, tokenizer: PreTrainedTokenizerBase):
    config = SFTDataConfig(name=str(seven), batch_size=5, shuffle=False)
    data = SFTData(config, tokenizer, 3, 0)
    assert prompts(data, 3) == "abcdefgabcdefga"
    assert data.next_batch(4).metrics == {"epoch": 20 / 7}


@pytest.mark.usefixtures("datasets_cache")
def test_parquet_is_as_good_as_jsonl(seven: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    records = [json.loads(line) for line in seven.read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "seven.parquet")
    found = [
        prompts(SFTData(SFTDataConfig(name=str(path), batch_size=5), tokenizer, 3, 0), 7)
        for path in (seven, tmp_path / "seven.parquet")
    ]
    assert found[0] == found[1]


# The next batch, ahead of time


def test_batches_are_made_two_ahead_in_the_order_of_steps():
    """Begun when the step before them has its batch; none beyond the last step."""
    made: list[int] = []
    told = {step: threading.Event() for step in range(3, 7)}

    def make(step: int) -> Batch:
        made.append(step)
        told[step].set()
        return Batch([], {"step": step}, sampling=FROM_TEXT)

    prefetch = Prefetch(make, 3, 6)
    assert told[3].wait(10)
    assert made == [3]
    assert prefetch.get(3).metrics == {"step": 3}
    assert told[5].wait(10)
    assert made == [3, 4, 5]
    assert [prefetch.get(step).metrics["step"] for step in (4, 5, 6)] == [4, 5, 6]
    prefetch.close()
    assert made == [3, 4, 5, 6]


def test_a_record_that_is_bad_is_reported_at_its_step():
    """No batch is made behind it: that would not be the next one."""
    made: list[int] = []

    def make(step: int) -> Batch:
        made.append(step)
        if step == 2:
            raise BadRecord("record 17 is bad")
        return Batch([], sampling=FROM_TEXT)

    prefetch = Prefetch(make, 1, 5)
    prefetch.get(1)
    for step in (2, 3):
        with pytest.raises(BadRecord, match="record 17"):
            prefetch.get(step)
    prefetch.close()
    assert made == [1, 2]


def test_defaults_fit_each_other():
    """A configuration without any key is one that can be trained with."""
    assert SFTConfig().seq_len >= SFTConfig().rows
