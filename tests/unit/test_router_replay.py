"""Tokens pass through the experts that a server chose, in each family that does not say why not."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import draws
import numpy as np
import pytest
import torch
from families import FAMILIES, UNREPLAYED, make, make_config, make_model
from one_rank import one_rank
from runs import CONFIGS, REPOSITORY
from transformers import PreTrainedModel

from cairn.config.rl import RLConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.launch import main
from cairn.run.batches import EXPERTS, FROM_TEXT, UNKNOWN_EXPERT, Batch, Sample
from cairn.run.errors import UsageError
from cairn.trainer.attention.context import part_of_rows
from cairn.trainer.group import Axis, RankGroup
from cairn.trainer.losses import Likelihood
from cairn.trainer.models.model import build_model, check_parts, layers_of
from cairn.trainer.models.trained import Trained
from cairn.trainer.optimizers import make_optimizer
from cairn.trainer.packing import MicroBatch, fill_rows, make_rank_batch
from cairn.trainer.router_replay import RouterReplay
from cairn.trainer.scoring.tokens import Scorer
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import train_step

group = one_rank
LENGTHS = (9, 14, 5)
COUNT, CHOSEN = 4, 2
"""Experts of a layer in the tiny families, and those of a token."""
REPLAYED = [family for family in FAMILIES if family not in UNREPLAYED]
CPU = torch.device("cpu")


def samples_with(experts: list[np.ndarray] | None = None) -> list[Sample]:
    """Samples of several lengths, perhaps with experts."""
    draw = np.random.default_rng(7)
    made = [Sample(draw.integers(6, 96, n).astype(np.int32), np.arange(n) >= 1) for n in LENGTHS]
    for sample, own in zip(made, experts or (), strict=False):
        sample.columns[EXPERTS] = own.astype(np.int16)
    return made


def at_random(layers: int, seed: int = 3) -> list[np.ndarray]:
    """For each sample, experts of each token in each layer."""
    draw = np.random.default_rng(seed)
    return [
        np.argsort(draw.random((length, layers, COUNT)), -1)[..., :CHOSEN].astype(np.int16)
        for length in LENGTHS
    ]


def in_rows(samples: list[Sample], *, packed: bool = False) -> MicroBatch:
    """Each in a row of its own, with padding behind it; or two in one row."""
    columns = [name for name in (EXPERTS,) if name in samples[0].columns]
    rows = [samples[:2], samples[2:]] if packed else [[one] for one in samples]
    return fill_rows(rows, columns=columns)


@contextmanager
def choices_of(model: PreTrainedModel) -> Iterator[dict[int, torch.Tensor]]:
    """By layer, the experts of the tokens of the latest pass, as the experts are given them."""
    found: dict[int, torch.Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            number = int(re.search(r"layers\.(\d+)\.", name)[1])

            def note(_: Any, given: Any, number: int = number) -> None:
                found[number] = next(one for one in given[1:] if not one.is_floating_point())

            hooks.append(module.register_forward_pre_hook(note))
    yield found
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("family", draws.cases(list(FAMILIES), __name__, 6))
def test_a_familys_choice_can_be_replayed_or_the_run_does_not_start(tmp_path: Path, family: str):
    """And docs/reference/models.md says so."""
    make_config(family).save_pretrained(tmp_path)
    config = TrainerConfig(router_replay=True)
    if family not in UNREPLAYED:
        check_parts(tmp_path, config)
        return
    with pytest.raises(UsageError, match=rf"router_replay can't serve \w+: .*({UNREPLAYED[family][1]})"):
        check_parts(tmp_path, config)


def test_a_dry_run_refuses_a_model_without_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(REPOSITORY)
    argv = ["rl", "@", f"{CONFIGS}/rl.toml", "--trainer.router-replay", "true", "--dry-run"]
    monkeypatch.setattr("sys.argv", [*argv, "--output-dir", str(tmp_path / "run")])
    assert main.rl() == 2
    told = "--trainer.router_replay can't serve Qwen3ForCausalLM: its layers have no experts; leave it out"
    assert told in capsys.readouterr().err


def test_experts_that_would_count_nothing_are_refused(tmp_path: Path):
    """DeepSeek-V2 gives experts of groups that its router would not choose a weight of 0."""
    grouped = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
    make_config("deepseek_v2", **grouped, num_experts_per_tok=1).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="would not have chosen count nothing"):
        check_parts(tmp_path, TrainerConfig(router_replay=True))


@pytest.mark.parametrize("family", draws.cases(REPLAYED, __name__, 2))
def test_tokens_pass_through_the_recorded_experts(family: str):
    """With a family's own choice nothing changes; where nobody knows the experts, the router chooses."""
    model = make_model(family)
    plain, replaying = Scorer(model, CPU), Scorer(model, CPU)
    rows = in_rows(samples_with())
    with torch.no_grad(), choices_of(model) as chosen:
        expected = plain.logprobs(rows, 1.0)
        own = dict(chosen)
        replaying.replay = RouterReplay(model)
        assert torch.equal(replaying.logprobs(rows, 1.0), expected)  # a batch without experts

        layers = model.config.get_text_config().num_hidden_layers
        column = torch.full((*rows.input_ids.shape, layers, CHOSEN), UNKNOWN_EXPERT, dtype=torch.int16)
        for layer, of_layer in own.items():
            column[:, :, layer] = of_layer.view(*rows.input_ids.shape, CHOSEN).short()
        rows.columns[EXPERTS] = column
        replaying.replay.check([rows])
        assert torch.equal(replaying.logprobs(rows, 1.0), expected)
        known = torch.arange(column.shape[1]) % 3 > 0
        rows.columns[EXPERTS] = torch.where(known[:, None, None], column, UNKNOWN_EXPERT)
        assert torch.equal(replaying.logprobs(rows, 1.0), expected)

        others = samples_with(at_random(layers))
        changed = in_rows(others)
        found = replaying.logprobs(changed, 1.0)
        for layer, of_layer in chosen.items():
            told = changed.columns[EXPERTS][:, :, layer].flatten(0, 1).long()
            known = told[:, 0] != UNKNOWN_EXPERT
            assert int(known.sum()) == sum(LENGTHS)
            assert torch.equal(of_layer[known], told[known])
        for number, one in enumerate(others):
            alone = replaying.logprobs(in_rows([one]), 1.0)
            torch.testing.assert_close(found[number, : LENGTHS[number] - 1], alone[0], atol=2e-5, rtol=0)
    assert (found - expected).abs().max() > 0.01


def test_weights_and_gradients_are_those_of_the_routers_own_logits():
    """As by hand for Qwen3: a softmax of all logits, at the recorded experts, made a sum of 1."""
    model, by_hand = (make_model("qwen3_moe", norm_topk_prob=True) for _ in range(2))
    rows = in_rows(samples_with(at_random(2)), packed=True)
    scorer = Scorer(model, CPU)
    scorer.replay = RouterReplay(model)
    scorer.logprobs(rows, 1.0).sum().backward()
    told = rows.columns[EXPERTS].flatten(0, 1).long()
    reference = Scorer(by_hand, CPU)
    for number, layer in enumerate(layers_of(by_hand)):

        def chosen(_: Any, __: Any, output: Any, layer: int = number) -> Any:
            logits, _, own = output
            experts = torch.where(told[:, layer] >= 0, told[:, layer], own)
            weights = logits.exp().gather(-1, experts)
            return logits, weights / weights.sum(-1, keepdim=True), experts

        layer.mlp.gate.register_forward_hook(chosen)
    reference.logprobs(rows, 1.0).sum().backward()
    gradients = {name: parameter.grad for name, parameter in by_hand.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-4, rtol=1e-4, msg=name)
    assert gradients["model.layers.0.mlp.gate.weight"].abs().max() > 0.01


def trained(folder: Path, group: RankGroup, **settings: Any) -> tuple[dict[str, float], list[torch.Tensor]]:
    """One step with experts that the router does not choose: its metrics, and the weights."""
    config = TrainerConfig(seq_len=40, router_replay=True, optimizer={"lr": 1e-3}, **settings)
    model = build_model(folder, config, group)
    policy = Trained(model, make_optimizer(model.named_parameters(), config.optimizer))
    policy.begin(folder)
    state = TrainerState(config, group, {POLICY: policy}, TrainerProgress())
    state.scorer.replay = RouterReplay(model)
    batch = Batch(samples_with(at_random(2)), sampling=FROM_TEXT)
    rows = make_rank_batch(batch, config, rank=0, world_size=1, arrange=state.scorer.rows.arrange)
    row = train_step(state, rows, 1, Likelihood())
    return row, list(model.parameters())


def test_activations_are_computed_again_with_the_same_experts(tmp_path: Path, group: RankGroup):
    """And the loss that balances experts counts what the router itself would choose."""
    folder = make("qwen3_moe", tmp_path / "model")
    row, weights = trained(folder, group)
    again, same = trained(folder, group, activation_checkpointing=True)
    assert again == row
    assert all(map(torch.equal, same, weights))
    sharded, _ = trained(folder, group, precision={"compute": "bfloat16"})  # FSDP2 changes modules' classes
    assert sharded["loss"] == pytest.approx(row["loss"], rel=0.02)
    balanced, _ = trained(folder, group, router_aux_coef=0.1)
    assert balanced["router_balance"] > 0


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_rows_have_the_experts_of_their_own_tokens(size: int):
    """Behind the end of a row they are unknown."""
    rows = in_rows(samples_with(at_random(2)), packed=True)
    parts = [part_of_rows(rows, Axis(rank, size), replays=True) for rank in range(size)]
    together = torch.cat([part.experts for part in parts], 1)
    width = rows.input_ids.shape[1]
    assert torch.equal(together[:, :width], rows.columns[EXPERTS])
    assert (together[:, width:] == UNKNOWN_EXPERT).all()
    for part in parts:
        assert part.experts.shape[:2] == part.input_ids.shape
    assert part_of_rows(rows, Axis(0, size)).experts is None, "a reference model replays nothing"


def test_a_server_of_another_model_is_found_out():
    """Experts that there are not, or in layers that there are not."""
    model = make_model("qwen3_moe")
    replay = RouterReplay(model)
    replay.check([in_rows(samples_with()), in_rows(samples_with(at_random(2))), fill_rows([])])
    with pytest.raises(UsageError, match=r"tell \[3, 2\] experts of each token .* has \[2, 2\]"):
        replay.check([in_rows(samples_with(at_random(3)))])
    too_many = [one + 1 for one in at_random(2)]
    with pytest.raises(UsageError, match=r"tell of expert 4 of a layer .* has 4 there"):
        replay.check([in_rows(samples_with(too_many))])


def test_what_can_not_be_replayed_is_refused_by_name():
    """And an `rl` run tells its servers and its orchestrator."""
    with pytest.raises(ValueError, match=r"router_replay.*a compiled layer"):
        TrainerConfig(router_replay=True, compile=True)
    run = RLConfig(trainer={"router_replay": True})
    assert (run.inference.return_experts, run.orchestrator.router_replay) == (True, True)
    assert not RLConfig().inference.return_experts
