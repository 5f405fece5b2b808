"""What holds for each model family, on one rank; docs/reference/models.md has the table.

`PYTHONPATH=tests python tests/unit/test_families.py` writes the table anew.
"""

import json
import os
import re
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import draws
import numpy as np
import pytest
import torch
from families import FAMILIES, SERVED, UNDEALT, UNDIVIDED, UNREPLAYED, UNSHARED, make, make_config
from one_rank import joined, one_rank
from runs import ABOUT
from safetensors.torch import load_file
from tiny import VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.sharded_files import read_tensors, write_tensors
from cairn.config.trainer import SFTConfig
from cairn.model.hub_layout import layout_of, tensors_in_memory
from cairn.run.batches import FROM_TEXT, Batch, Sample
from cairn.run.errors import UsageError
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import Likelihood
from cairn.trainer.models.model import build_model, companions, weights_in
from cairn.trainer.models.trained import Trained
from cairn.trainer.optimizers import make_optimizer
from cairn.trainer.packing import RankBatch, make_rank_batch
from cairn.trainer.scoring.tokens import make_scorer
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import train_step

group = one_rank

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- table: tests/unit/test_families.py -->\n", "<!-- end -->\n"
HEADINGS = (
    "family",
    "kind",
    "rows",
    "tensors on disk",
    "resume",
    "opens in transformers",
    "context",
    "tensor",
    "expert",
    "replay",
    "server = trainer",
)
UPDATE = "`PYTHONPATH=tests python tests/unit/test_families.py` writes the table anew"
NOT_TRIED = "not tried"
LENGTHS = (9, 14, 5, 7, 12, 3)
CONFIG = {"seq_len": 40, "optimizer": {"lr": 1e-3}}
CLOSE = 2e-5
"""Logprobs and losses of float32 differ by less where nothing but the order of sums does."""


@dataclass(frozen=True)
class Verdict:
    """A family's line in the table but its last five columns: what was found."""

    rows: str
    disk: str
    resume: str
    opens: str


def make_batch(seed: int) -> Batch:
    """Samples of several lengths, each learned from its third token on."""
    draw = np.random.default_rng(seed)
    return Batch(
        [Sample(draw.integers(6, 96, n).astype(np.int32), np.arange(n) >= 2) for n in LENGTHS],
        sampling=FROM_TEXT,
    )


def start(folder: Path, group: RankGroup) -> TrainerState:
    """A trainer's state before its first step, the weights still undefined."""
    config = SFTConfig(**CONFIG)
    model = build_model(folder, config, group)
    policy = Trained(model, make_optimizer(model.named_parameters(), config.optimizer))
    return TrainerState(config, group, {POLICY: policy}, TrainerProgress())


def make_rows(state: TrainerState, batch: Batch) -> RankBatch:
    """The batch in the rows that the model needs."""
    return make_rank_batch(batch, state.config, rank=0, world_size=1, arrange=state.scorer.rows.arrange)


def loss_of(state: TrainerState, batch: Batch) -> float:
    """Of the batch without dropout."""
    work = make_rows(state, batch)
    state.policy.module.eval()
    with torch.no_grad():
        total = -sum(state.scorer.logprobs(micro, 1.0).sum().item() for micro in work.micros)
    state.policy.module.train()
    return total / work.counts.learned


def step(state: TrainerState, number: int) -> float:
    """One optimiser step; returns the loss."""
    return train_step(state, make_rows(state, make_batch(number)), number, Likelihood())["loss"]


def save(state: TrainerState, published: Path, store: CheckpointStore) -> Path:
    """A checkpoint of the state, as the trainer's own saver writes it but without its processes."""
    number = state.progress.step
    store.begin(number, ["model", "trainer"])
    files = {f"model/{name}": content for name, content in companions(state.policy.module, published).items()}
    about = {"progress": asdict(state.progress), "rows": state.scorer.rows.name}
    files["trainer/state.json"] = json.dumps(about).encode()
    with tempfile.TemporaryDirectory() as scratch:
        for stem, tensors in state.tensors().items():
            folder, _, name = stem.rpartition("/")
            (Path(scratch) / folder).mkdir()
            write_tensors(Path(scratch) / folder, tensors, name)
        for path in Path(scratch).rglob("*.*"):
            files[str(path.relative_to(scratch))] = path.read_bytes()
    store.write_part(number, "files", files, "run:1")
    store.commit(number, {"files": "run:1"}, timeout=0.0, about=ABOUT)
    return store.folder(number)


def reference_loss(model: PreTrainedModel, batch: Batch) -> float:
    """Of the model as transformers opens and runs it, one sample at a time."""
    total, learned = 0.0, 0
    with torch.no_grad():
        for sample in batch.samples:
            ids = torch.from_numpy(sample.token_ids).long()[None]
            logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            mask = torch.from_numpy(sample.loss_mask[1:])
            total -= logprobs.gather(-1, ids[0, 1:, None])[mask].sum().item()
            learned += int(mask.sum())
    return total / learned


def open_in_transformers(family: str, folder: Path) -> PreTrainedModel:
    """With attention as its makers wrote it where it is capped, since transformers' sdpa leaves that out."""
    capped = "attn_logit_softcapping" in FAMILIES[family].settings
    model, about = AutoModelForCausalLM.from_pretrained(
        folder,
        output_loading_info=True,
        attn_implementation="eager" if capped else None,
        dtype=torch.float32,
    )
    assert not any(about.values()), about
    return model


def disk_of(state: TrainerState) -> str:
    """How the files' tensors differ from those in memory."""
    layout = layout_of(state.policy.module)
    if len(layout.places) > len(layout.shapes):
        return "cut apart"
    renamed = any(name != place.name for name, place in layout.places.items())
    return "other names" if renamed else "as in memory"


COMPUTES = ("float32", "bfloat16")
"""What the plain model computes in, and FSDP2's."""
BUILT = [(family, compute) for family in FAMILIES for compute in COMPUTES]


@pytest.mark.parametrize(("family", "compute"), draws.cases(BUILT, "models that are built", len(BUILT) // 4))
def test_a_model_is_built_as_transformers_builds_it(
    family: str, compute: str, group: RankGroup, tmp_path: Path
):
    """Buffers have their values, bit by bit; parameters are there, and tied where they are."""
    make_config(family).save_pretrained(tmp_path)
    model = build_model(tmp_path, SFTConfig(**CONFIG, precision={"compute": compute}), group)
    whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)
    found, expected = (dict(m.named_buffers(remove_duplicate=False)) for m in (model, whole))
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        assert found[name].dtype == buffer.dtype
        assert torch.equal(found[name], buffer), name
    for duplicates in (True, False):
        parameters, originals = (
            dict(m.named_parameters(remove_duplicate=duplicates)) for m in (model, whole)
        )
        assert parameters.keys() == originals.keys()
        for name, parameter in originals.items():
            mine = parameters[name]
            assert (mine.shape, mine.dtype) == (parameter.shape, parameter.dtype)
            assert (mine.device, mine.requires_grad) == (parameter.device, parameter.requires_grad)


def examine(family: str, folder: Path, group: RankGroup) -> Verdict:
    """Train a step, save, resume, train another, and open the checkpoint; whatever is wrong raises."""
    published = make(family, folder / "published")
    state = start(published, group)
    read_tensors(published, weights_in(state.policy.module, published), "model")
    state.check_model()
    # Samples that share a micro-batch are scored as transformers scores each alone.
    expected = reference_loss(open_in_transformers(family, published), make_batch(1))
    assert abs(loss_of(state, make_batch(1)) - expected) < CLOSE
    step(state, 1)
    saved = save(state, published, CheckpointStore(folder / "checkpoints"))
    names, published_names = (
        load_file(path / "model.safetensors").keys() for path in (saved / "model", published)
    )
    assert names == published_names

    resumed = start(saved / "model", group)
    resumed.load(saved)
    resumed.check_model()
    assert resumed.scorer.rows == state.scorer.rows
    assert_same(state, resumed)
    assert step(resumed, 2) == step(state, 2)
    assert_same(state, resumed)

    opened = open_in_transformers(family, saved / "model")
    with torch.no_grad():
        for name, tensor in tensors_in_memory(resumed.policy.module).items():  # back to what was saved
            tensor.copy_(tensors_in_memory(opened)[name])
        ids = torch.arange(6, 6 + 20)[None] % VOCABULARY
        resumed.policy.module.eval()
        ours, theirs = (model(input_ids=ids).logits for model in (resumed.policy.module, opened))
    assert (ours - theirs).abs().max() < CLOSE
    return Verdict(state.scorer.rows.name, disk_of(state), "same bits", "same logits")


def assert_same(a: TrainerState, b: TrainerState) -> None:
    """Weights, buffers and the optimiser's state, bit for bit."""
    mine, other = tensors_in_memory(a.policy.module), tensors_in_memory(b.policy.module)
    assert mine.keys() == other.keys()
    assert [name for name, tensor in mine.items() if not torch.equal(tensor, other[name])] == []
    mine, other = (state.tensors().get("trainer/optimizer", {}) for state in (a, b))
    assert mine.keys() == other.keys()
    assert [name for name, tensor in mine.items() if not torch.equal(tensor, other[name])] == []


def line(family: str, verdict: Verdict) -> str:
    """The family's line in the table."""
    refusals = (UNSHARED, UNDIVIDED, UNDEALT, UNREPLAYED)
    shared = (refused[family][0] if family in refused else "yes" for refused in refusals)
    cells = (family, FAMILIES[family].kind, *asdict(verdict).values(), *shared)
    cells += (SERVED.get(family, NOT_TRIED),)
    return f"| {' | '.join(cells)} |"


def table_on_page() -> list[str]:
    """The lines of docs/reference/models.md's table, headings apart."""
    text = PAGE.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].splitlines()[2:]


@pytest.mark.parametrize("family", draws.cases(list(FAMILIES), __name__, len(FAMILIES) // 4))
def test_a_family_is_trained_saved_resumed_and_opened_elsewhere(
    tmp_path: Path, group: RankGroup, family: str
):
    """And docs/reference/models.md says so."""
    found = line(family, examine(family, tmp_path, group))
    assert found in table_on_page(), (
        "`PYTHONPATH=tests python tests/unit/test_families.py` writes the table anew"
    )


def test_code_that_multiplies_by_float32_is_refused_in_16_bits(tmp_path: Path, group: RankGroup):
    """MiniMax's linear attention multiplies what it computes by decays, which are buffers."""
    config = SFTConfig(precision={"compute": "bfloat16"})
    model = build_model(make("minimax", tmp_path), config, group)
    read_tensors(tmp_path, weights_in(model, tmp_path), "model")
    with pytest.raises(UsageError, match=r"^precision.compute = 'bfloat16' can't serve MiniMaxForCausalLM: "):
        make_scorer(model, config, group.device)
    model = build_model(tmp_path, SFTConfig(), group)
    make_scorer(model, SFTConfig(), group.device)


def test_the_table_has_each_family_once():
    """In the order of the list."""
    names = [re.match(r"\| (\w+) \|", found)[1] for found in table_on_page()]
    assert names == list(FAMILIES)


def main() -> None:
    """Write the table into docs/reference/models.md."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    os.environ["HF_HUB_OFFLINE"] = "1"
    with joined() as group:
        for family in FAMILIES:
            with tempfile.TemporaryDirectory() as folder:
                lines.append(line(family, examine(family, Path(folder), group)))
            print(lines[-1], file=sys.stderr)
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(before + "\n".join(lines) + "\n" + after)


if __name__ == "__main__":
    main()
