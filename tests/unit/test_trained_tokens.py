"""What trainer and server say of the same tokens: written by ranks, bounded, and found for each turn."""

from pathlib import Path

import numpy as np
import pytest
from recorded_runs import keep, make, rollout, turn

import cairn
from cairn.config.rl_trainer import TrainerConfig
from cairn.run.batches import Batch, Piece, Sample, Sampling
from cairn.run.files import DamagedFile
from cairn.run.trained_tokens import VALUES, TrainedSample, TrainedTokens, digest_of
from cairn.trainer.packing import make_rank_batch
from cairn.trainer.tasks.rl import trained_tokens
from cairn.watch.trained_tokens import StepTokens


def sample(prompt: list[int], ids: list[int], gap: float = 0.25, *, entropies: bool = True) -> TrainedSample:
    """Logprobs -1, -2, ... of the server, and the trainer's that much higher."""
    sampled = -np.arange(1, len(ids) + 1, dtype=np.float32)
    return TrainedSample(
        digest_of(np.array(prompt, np.int32)),
        np.array(ids, np.int32),
        sampled,
        sampled + np.float32(gap),
        np.arange(len(ids), dtype=np.float32) if entropies else None,
    )


def part(samples: list[TrainedSample]) -> dict[str, np.ndarray]:
    """As a part of a file."""
    columns = {name: [getattr(one, name) for one in samples] for name in VALUES}
    return {
        "lengths": np.array([len(one) for one in samples], np.int32),
        "prompts": np.array([one.prompt for one in samples], np.uint64),
        **{name: np.concatenate(found) for name, found in columns.items() if found[0] is not None},
    }


def same(one: TrainedSample, other: TrainedSample) -> bool:
    return one.prompt == other.prompt and all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("token_ids", "sampler_logprobs", "logprobs", "entropies")
    )


@pytest.mark.parametrize("entropies", [True, False])
def test_what_ranks_write_is_read_together(tmp_path: Path, entropies: bool):
    kept = TrainedTokens(tmp_path / "tokens")
    first = [sample([1, 2], [3, 4, 5], entropies=entropies), sample([1], [6], entropies=entropies)]
    second = [sample([9], [7, 8], entropies=entropies)]
    kept.write(4, 0, 2, [part([one]) for one in first], 1.0)
    kept.write(4, 1, 2, [part(second)], 1.0)
    found = kept.read(4)
    assert all(same(one, other) for one, other in zip(found, [*first, *second], strict=True))
    assert (kept.steps(), kept.read(5)) == ([4], [])


def test_the_oldest_steps_go_and_steps_that_are_taken_again(tmp_path: Path):
    kept = TrainedTokens(tmp_path)
    kept.write(1, 0, 1, [part([sample([1], [2] * 1000)])], 1.0)
    size = kept.path(1, 0, 1).stat().st_size
    kept = TrainedTokens(tmp_path)  # another process, which finds the file
    for step in range(2, 7):
        kept.write(step, 0, 1, [part([sample([1], [2] * 1000)])], 3.5 * size / 1e9)
    assert kept.steps() == [4, 5, 6]
    kept.write(5, 1, 2, [part([sample([1], [2])])], 1.0)  # of another number of ranks
    kept.forget_after(4)
    assert [path.name for path in tmp_path.iterdir()] == ["step_4.0-of-1.safetensors"]
    kept.write(5, 0, 1, [part([sample([1], [2] * 1000)])], size / 1e9)
    assert kept.steps() == [5], "the newest stays, however large"


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_a_damaged_file_is_told(tmp_path: Path, content: bytes):
    (tmp_path / "step_3.0-of-1.safetensors").write_bytes(content)
    with pytest.raises(DamagedFile, match=r"step_3\.0-of-1\.safetensors: can't be read"):
        TrainedTokens(tmp_path).read(3)


def test_learned_tokens_are_found_in_packed_rows(tmp_path: Path):
    """Each with its own values, wherever its sample lies; of rows that cut a sample, what is left of it."""

    def answer(prompt: list[int], ids: list[int]) -> Sample:
        return Sample.of_answer(prompt, ids, logprobs=[-float(one) for one in ids], advantages=1.0)

    several = [
        Piece([1, 2]),
        Piece([11, 12], {"logprobs": [-11.0, -12.0], "advantages": 1.0}),
        Piece([3]),
        Piece([13], {"logprobs": [-13.0], "advantages": 1.0}),
    ]
    samples = [
        answer([1, 2, 3], [21, 22]),
        answer([4], [31, 32, 33]),
        answer([1], [41]).unlearned(),
        Sample.of_pieces(several),
        answer([5], list(range(50, 90))),
    ]
    config = TrainerConfig(seq_len=16, micro_batch_size=2, max_steps=1)
    batch = make_rank_batch(Batch(samples, sampling=Sampling(1.0)), config, rank=0, world_size=1)
    ids = [micro.input_ids[:, 1:].float() for micro in batch.micros]
    parts = [
        trained_tokens(micro, 0.5 - values, values / 100)
        for micro, values in zip(batch.micros, ids, strict=True)
    ]
    kept = TrainedTokens(tmp_path)
    kept.write(1, 0, 1, parts, 1.0)
    found = kept.read(1)
    expected = {
        tuple(one.token_ids[:16][one.loss_mask[:16]].tolist()): one for one in samples if one.loss_mask.any()
    }
    assert {tuple(one.token_ids.tolist()) for one in found} == expected.keys()
    assert len(found) == len(expected)
    for one in found:
        whole = expected[tuple(one.token_ids.tolist())]
        assert one.prompt == digest_of(whole.token_ids[: np.flatnonzero(whole.loss_mask)[0]])
        assert np.array_equal(one.sampler_logprobs, -one.token_ids.astype(np.float32))
        assert np.array_equal(one.logprobs, 0.5 - one.token_ids)
        assert one.entropies is not None
        assert np.allclose(one.entropies, one.token_ids / 100)
    assert "entropies" not in trained_tokens(batch.micros[0], ids[0], None)


def test_each_turn_finds_its_tokens(tmp_path: Path):
    """In its branch, after its prompt; what was cut off, masked or left out has none."""
    run = make(tmp_path / "run")

    def said(ids: list[int], prompt: list[int], start: int = 0, branch: int = 0) -> dict[str, object]:
        logprobs = [-float(one) for one in range(start + 1, start + len(ids) + 1)]
        about = {"token_ids": ids, "logprobs": logprobs, "prompt_ids": prompt, "branch": branch}
        return {**turn("asked", "said", 3), **about, "versions": []}

    rows = [
        rollout(3, 0, 0, turns=[said([5, 6], [1]), said([7], [2], start=2), said([8], [3], branch=1)]),
        rollout(3, 0, 1, turns=[said([5, 6, 7], [9])]),
        rollout(3, 0, 2, turns=[said([4, 4, 4, 4], [1])]),
        rollout(3, 0, 3, turns=[], failed="died", reward=None),
    ]
    keep(run, 3, rows)
    samples = [
        *(sample([1], [5, 6, 7], 0.5), sample([3], [8], -0.25)),
        *(sample([9], [5, 6, 7], 1.0), sample([1], [4, 4], 2.0)),
    ]
    TrainedTokens(run.tokens).write(3, 0, 1, [part(samples)], 1.0)
    frame = cairn.Run(run.path).tokens(3)
    gaps = frame.groupby(["sample", "turn"])["gap"].apply(list)
    assert gaps[0, 0] == [0.5, 0.5]
    assert (gaps[0, 1], gaps[0, 2]) == ([0.5], [-0.25])
    assert gaps[1, 0] == [1.0] * 3, "another prompt, the same answer"
    assert frame[frame["sample"] == 2]["learned"].tolist() == [True, True, False, False]
    assert frame["entropy"].tolist()[:3] == [0.0, 1.0, 2.0]
    assert np.allclose(frame["ratio"][frame["learned"]], np.exp(frame["gap"][frame["learned"]]))
    with pytest.raises(cairn.UsageError, match="no rollouts of step 4 are kept"):
        cairn.Run(run.path).tokens(4)
    nothing = StepTokens([])
    assert not nothing.known
    assert not nothing.of(rows[0]["turns"])[0].learned.any()
