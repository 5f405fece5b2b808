"""Losses: those that are built in against their formulas, and losses of the user's own."""

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from cairn.config.loss import (
    CispoConfig,
    CustomLossConfig,
    CustomSFTLossConfig,
    IcePopConfig,
    LikelihoodConfig,
    LossConfig,
    PolicyLossConfig,
    PPOClipConfig,
    SFTLossConfig,
)
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import SFTConfig
from cairn.launch.commands import start
from cairn.run.batches import COLUMNS, Column, RLBatch, Sample, Sampling, read_batch, write_batch
from cairn.run.changes import Change, Settings
from cairn.run.errors import UsageError
from cairn.run.extensions import BadExtension
from cairn.run.messages import BatchHeader, ShippedBatch
from cairn.run.recipe import TRAINER, settings_of
from cairn.trainer.losses import LOSSES, Likelihood, Loss, LossInputs, LossSums, make_loss
from cairn.trainer.packing import BatchCounts, MicroBatch, fill_rows, make_rank_batch

DOCS = Path(__file__).parents[2] / "docs"


def random_micro(seed: int) -> tuple[torch.Tensor, MicroBatch]:
    """Logprobs [5, 12] under the current weights, and a micro-batch with those of the sampler."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    sampler, advantages = -normal(5, 13).abs(), normal(5, 13)
    mask = torch.rand(5, 13, generator=draw) < 0.6
    tokens = torch.zeros(5, 13, dtype=torch.int64)
    logprobs = (sampler[:, 1:] + 0.4 * normal(5, 12)).requires_grad_()
    micro = MicroBatch(
        input_ids=tokens,
        position_ids=tokens,
        loss_mask=mask,
        is_token=torch.ones_like(mask),
        columns={"logprobs": sampler, "advantages": advantages},
        learned=mask.flatten().nonzero()[:, 0],
        bounds=torch.arange(66, dtype=torch.int32),
        samples=65,
        longest=1,
        tokens=tokens.numel(),
        index=0,
    )
    return logprobs, micro


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.1, 0.3), (0.0, 0.0)])
def test_the_policy_loss_is_that_of_the_paper(seed: int, clip: tuple[float, float]):
    """Token by token, with its gradient, and nothing from tokens that are not learned."""
    logprobs, micro = random_micro(seed)
    loss = make_loss(PPOClipConfig(clip_low=clip[0], clip_high=clip[1]))
    sums = loss(LossInputs.of(logprobs, micro))
    sums.loss.backward()
    total, clipped, ratios, gaps, kl = 0.0, 0, [], [], 0.0
    gradient = torch.zeros(5, 12)
    for row in range(5):
        for place in range(12):
            if not micro.loss_mask[row, place + 1]:
                continue
            gap = logprobs[row, place].item() - micro.columns["logprobs"][row, place + 1].item()
            advantage = micro.columns["advantages"][row, place + 1].item()
            ratio = math.exp(gap)
            limited = min(max(ratio, 1 - clip[0]), 1 + clip[1])
            total -= min(ratio * advantage, limited * advantage)
            if ratio * advantage <= limited * advantage:
                gradient[row, place] = -ratio * advantage
            else:
                clipped += 1
            ratios.append(ratio)
            gaps.append(abs(gap))
            kl += ratio - 1 - gap
    assert 0 < clipped < len(ratios)
    assert sums.loss.item() == pytest.approx(total, rel=1e-4)
    torch.testing.assert_close(logprobs.grad, gradient, atol=1e-5, rtol=1e-4)
    assert sums.means["ratio/mean"].item() == pytest.approx(sum(ratios), rel=1e-5)
    assert sums.means["ratio/clipped"].item() == clipped
    assert sums.means["mismatch/logprob"].item() == pytest.approx(sum(gaps), rel=1e-5)
    assert sums.means["mismatch/kl"].item() == pytest.approx(kl, rel=1e-4)
    assert sums.maxima["ratio/max"].item() == pytest.approx(max(ratios), rel=1e-5)
    assert sums.maxima["mismatch/logprob_max"].item() == pytest.approx(max(gaps), rel=1e-5)


@pytest.mark.parametrize("kind", ["cispo", "icepop"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_older_policies_count_by_their_ratio(seed: int, kind: str):
    """The gradient is that of plain policy gradient, weighted with a ratio that is bounded or left out."""
    logprobs, micro = random_micro(seed)
    config = CispoConfig(ratio_max=1.3) if kind == "cispo" else IcePopConfig(ratio_min=0.8, ratio_max=1.3)
    sums = make_loss(config)(LossInputs.of(logprobs, micro))
    sums.loss.backward()
    gradient, bounded = torch.zeros(5, 12), 0
    for row, place in micro.loss_mask[:, 1:].nonzero().tolist():
        ratio = math.exp(logprobs[row, place].item() - micro.columns["logprobs"][row, place + 1].item())
        weight = min(ratio, 1.3) if kind == "cispo" else ratio if 0.8 <= ratio <= 1.3 else 0.0
        bounded += weight != ratio
        gradient[row, place] = -weight * micro.columns["advantages"][row, place + 1].item()
    torch.testing.assert_close(logprobs.grad, gradient, atol=1e-5, rtol=1e-4)
    assert sums.means["ratio/clipped"].item() == bounded
    assert 0 < bounded < int(micro.loss_mask[:, 1:].sum())


def test_the_sft_loss_is_the_likelihood_of_what_is_learned():
    logprobs, micro = random_micro(0)
    sums = Likelihood()(LossInputs.of(logprobs, micro))
    sums.loss.backward()
    mask = micro.loss_mask[:, 1:]
    assert sums.loss.item() == pytest.approx(-logprobs[mask].sum().item())
    torch.testing.assert_close(logprobs.grad, -mask.float())


# Which loss

PARSE = TypeAdapter(PolicyLossConfig).validate_python
PARSE_SFT = TypeAdapter(SFTLossConfig).validate_python


def test_every_built_in_loss_has_its_settings():
    """And each is made with the defaults that the configuration has."""
    seen: set[str] = set()
    for union, parse in ((PolicyLossConfig, PARSE), (SFTLossConfig, PARSE_SFT)):
        members = get_args(get_args(union)[0])
        configs = {tag.tag: get_args(member)[0] for member in members for tag in member.__metadata__}
        names = configs.keys() - {"module:Class"}
        for name in names:
            assert type(make_loss(parse({"type": name}))) is LOSSES[name]
            assert vars(make_loss(configs[name]())) == vars(LOSSES[name]())
        seen |= names
    assert seen | {"dpo", "ipo", "kto", "simpo", "orpo", "bradley_terry"} == LOSSES.keys(), (
        "those have tests of their own"
    )


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, PPOClipConfig()),
        ({"type": "ppo_clip", "clip_low": 0.1}, PPOClipConfig(clip_low=0.1)),
        ({"type": "cispo"}, CispoConfig()),
        ({"type": "icepop", "ratio_max": 3.0}, IcePopConfig(ratio_max=3.0)),
        ({"type": "a:B", "args": {"x": 1}}, CustomLossConfig(type="a:B", args={"x": 1})),
    ],
)
def test_a_section_is_of_its_type(section: dict, expected: LossConfig):
    config = TrainerConfig(loss=dict(section)).loss
    assert config == expected
    assert TrainerConfig.model_validate(TrainerConfig(loss=config).model_dump()).loss == expected


@pytest.mark.parametrize(
    "section",
    [
        {"type": "ppo_clip", "ratio_max": 2.0},
        {"type": "other"},
        {"type": ":B"},
        {"type": "clip"},
        {"correction": "cispo"},
    ],
)
def test_sections_that_are_refused(section: dict):
    with pytest.raises(ValidationError):
        PARSE(section)


def test_sft_has_losses_of_its_own():
    assert SFTConfig().loss == SFTConfig(loss={}).loss == LikelihoodConfig()
    assert type(make_loss(SFTConfig().loss)) is Likelihood
    own = SFTConfig(loss={"type": "a:B", "args": {"x": 1}})
    assert own.loss == CustomSFTLossConfig(type="a:B", args={"x": 1})
    assert SFTConfig.model_validate(own.model_dump()).loss == own.loss


@pytest.mark.parametrize(
    ("config", "section", "message"),
    [
        (SFTConfig, {"type": "clip"}, "'clip' is not one of likelihood, nor module:Class"),
        (SFTConfig, {"type": "likelyhood"}, "did you mean likelihood?"),
        (SFTConfig, {"type": "likelihood", "clip_low": 0.1}, "clip_low"),
        (SFTConfig, {"correction": "likelihood"}, "correction"),
        (
            TrainerConfig,
            {"type": "likelihood"},
            "not one of ppo_clip, cispo, icepop, gspo, dppo, sapo, gpg, nor module:Class",
        ),
    ],
)
def test_the_losses_of_one_command_are_not_for_the_other(config: Any, section: dict, message: str):
    with pytest.raises(ValidationError, match=re.escape(message)):
        config(loss=section)


# Losses of the user's own


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module `my_losses` of docs/how-to/policy-losses.md, `my_sft_loss` of extending.md, and no loss."""
    (code,) = re.findall(
        r"```python\n(import torch\n.*?)```", (DOCS / "how-to" / "policy-losses.md").read_text(), re.DOTALL
    )
    (of_sft,) = re.findall(
        r"```python\n(# my_sft_loss.*?)```", (DOCS / "how-to" / "extending.md").read_text(), re.DOTALL
    )
    (tmp_path / "my_losses.py").write_text(code)
    (tmp_path / "my_sft_loss.py").write_text(of_sft)
    (tmp_path / "my_mistakes.py").write_text("class Mean:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for module in ("my_losses", "my_sft_loss", "my_mistakes"):
        sys.modules.pop(module, None)


def random_samples(seed: int, lengths: list[int]) -> list[Sample]:
    draw = np.random.default_rng(seed)
    return [
        Sample.of_answer(
            [1] * (n // 3),
            draw.integers(1, 50, n - n // 3).tolist(),
            logprobs=(-draw.random(n - n // 3)).tolist(),
            advantages=draw.normal(),
        )
        for n in lengths
    ]


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("rows", [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 2, 0, 1]]])
def test_the_documented_loss_sees_samples_however_they_are_packed(rows: list[list[int]]):
    """Value and gradient are those of a loop over answers; it is divided by their number."""
    loss = make_loss(PARSE({"type": "my_losses:SequenceRatio", "args": {"clip": 0.02}}))
    samples = random_samples(0, [9, 6, 12, 5])
    change = [torch.randn(12, generator=torch.Generator().manual_seed(i)) * 0.2 for i in range(4)]
    micro = fill_rows([[samples[i] for i in row] for row in rows], 0, ["logprobs", "advantages"])
    now = torch.zeros(micro.input_ids.shape)
    for r, row in enumerate(rows):
        start = 0
        for i in row:
            n = len(samples[i].token_ids)
            now[r, start : start + n] = torch.from_numpy(samples[i].columns["logprobs"]) + change[i][:n]
            start += n
    logprobs = now[:, 1:].clone().requires_grad_()
    sums = loss(LossInputs.of(logprobs, micro))
    sums.loss.backward()

    expected, moved = 0.0, 0
    for i, sample in enumerate(samples):
        learned = sample.loss_mask.nonzero()[0]
        ratio = math.exp(change[i][learned].double().mean().item())
        advantage = float(sample.columns["advantages"][-1])
        bounded = min(max(ratio, 0.98), 1.02)
        expected -= min(ratio * advantage, bounded * advantage)
        moved += len(learned) * (ratio * advantage <= bounded * advantage)
    assert sums.loss.item() == pytest.approx(expected, rel=1e-4)
    assert int((logprobs.grad != 0).sum()) == moved
    assert 0 < moved < sum(int(sample.loss_mask.sum()) for sample in samples)
    assert loss.normaliser(BatchCounts(samples=4, tokens=32, learned=20, cut=0, unlearned=1)) == 3


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("rows", [[[0], [1], [2]], [[2, 0, 1]]])
@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_documented_loss_of_sft(rows: list[list[int]], power: float):
    """Value and gradient are those of a loop over samples, which are divided by how many of them learn."""
    section = {"type": "my_sft_loss:EachSample", "args": {"power": power}}
    loss = make_loss(SFTConfig(loss=section).loss)
    samples = [
        Sample(np.arange(1, n + 1, dtype=np.int32), np.arange(n) >= learned_from)
        for n, learned_from in ((7, 2), (4, 1), (5, 5))
    ]
    micro = fill_rows([[samples[i] for i in row] for row in rows], 0, [])
    logprobs = torch.zeros(micro.input_ids[:, 1:].shape)
    logprobs += -0.1 * micro.input_ids[:, 1:]
    logprobs.requires_grad_()
    sums = loss(LossInputs.of(logprobs, micro))
    sums.loss.backward()
    lengths = [int(sample.loss_mask[1:].sum()) for sample in samples]
    totals = [0.1 * int(sample.token_ids[1:][sample.loss_mask[1:]].sum()) for sample in samples]
    expected = sum(total / n**power for total, n in zip(totals, lengths, strict=True) if n)
    assert sums.loss.item() == pytest.approx(expected, rel=1e-5)
    assert logprobs.grad.sum().item() == pytest.approx(-sum(n ** (1 - power) for n in lengths if n), rel=1e-5)
    assert loss.normaliser(BatchCounts(samples=3, tokens=16, learned=8, cut=0, unlearned=1)) == 2


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "my_losses:Missing"}, "loss.type = 'my_losses:Missing': .*Missing"),
        ({"type": "my_losses:SequenceRatio", "args": {"clap": 1}}, "loss.args = .*clap"),
        ({"type": "my_mistakes:Mean"}, "does not extend cairn.trainer.losses.Loss"),
    ],
)
@pytest.mark.parametrize("parse", [PARSE, PARSE_SFT])
def test_a_loss_that_can_not_be_made(section: dict, message: str, parse: Any):
    with pytest.raises(BadExtension, match=message):
        make_loss(parse(section))


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize(("command", "config_class"), [("trainer", TrainerConfig), ("sft", SFTConfig)])
def test_a_loss_that_can_not_be_made_is_refused_before_anything_is_written(
    tmp_path: Path, command: str, config_class: Any
):
    folder = tmp_path / "run"
    data = {"data": {"name": "nowhere.jsonl"}} if command == "sft" else {}
    config = config_class(
        model={"name": "nowhere"}, loss={"type": "my_mistakes:Mean"}, output_dir=str(folder), **data
    )
    with pytest.raises(BadExtension, match="does not extend"):
        start(command, config)
    assert not folder.exists()


class ToReference(Loss):
    """The squared distance from a reference model's logprobs."""

    def __call__(self, inputs: LossInputs) -> LossSums:
        return LossSums((inputs.logprobs - inputs.column("reference"))[inputs.mask].square().sum())


def test_a_new_column_arrives_in_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Through a batch's file and packing; one entry in the table is all that it takes."""
    monkeypatch.setitem(COLUMNS, "reference", Column(np.float32, default=-1.0))
    answers = [[5, 6, 7], [8, 9]]
    samples = [
        Sample.of_answer([1, 2], answer, logprobs=0.0, advantages=1.0, reference=[-float(t) for t in answer])
        for answer in answers
    ]
    header = BatchHeader("r", "b", "r:1", 1, "r:b:0", [1], ShippedBatch(1, [[0, 0]], 2, 9, "digest", 0))
    batch = RLBatch(samples, sampling=Sampling(1.0), header=header)
    write_batch(tmp_path / "batch", batch)
    found = read_batch(tmp_path / "batch")
    assert found.digest() == batch.digest()
    work = make_rank_batch(found, TrainerConfig(seq_len=4), rank=0, world_size=1)
    total = 0.0
    for micro in work.micros:
        sums = ToReference()(LossInputs.of(torch.zeros(micro.input_ids[:, 1:].shape), micro))
        total += sums.loss.item()
        assert set(micro.columns["reference"][micro.input_ids <= 2].tolist()) == {-1.0}
    assert total == 5**2 + 6**2 + 8**2 + 9**2  # the first sample is cut after four tokens


def test_a_column_that_batches_lack_is_an_error():
    micro = fill_rows([[Sample.of_answer([1], [2, 3], logprobs=0.0)]], 0, ["logprobs"])
    inputs = LossInputs.of(torch.zeros(1, 2), micro)
    with pytest.raises(UsageError, match=r"needs the column 'advantages', and .* have logprobs"):
        make_loss(PPOClipConfig())(inputs)


@pytest.mark.parametrize("config", [SFTConfig, TrainerConfig])
def test_the_arguments_of_a_loss_are_compared_as_a_whole(config: Any):
    """Also one that has come or gone."""
    saved, now = (
        settings_of(config(loss={"type": "a:B", "args": args}).model_dump(), TRAINER)
        for args in ({"x": 1, "deep": {"y": 2}}, {"x": 1})
    )
    (change,) = Settings.of({"settings": saved}).changes(now, TRAINER, {})
    assert change == Change("loss.args", {"x": 1, "deep": {"y": 2}}, {"x": 1})
