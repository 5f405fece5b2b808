"""Adapters of PEFT with any settings: merged as PEFT does it, or refused by the setting's name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import draws
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import write_example
from transformers import AutoModelForCausalLM, AutoTokenizer

from cairn.checkpoint.manifest import CheckpointError
from cairn.config.model import ModelConfig
from cairn.formats import FORMATS
from cairn.formats.transfer.import_step import import_checkpoint
from cairn.launch.plan.model import described, resolve_model
from cairn.model.peft_settings import ALLOWED, adapter_settings
from cairn.run.errors import CairnError, UsageError

IDS = torch.arange(4, 60)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("base") / "base", tied=False)


@pytest.fixture(scope="module")
def tied_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("tied") / "base", tied=True)


def trained(base: Path, folder: Path, rows: int | None = None, **about: Any) -> torch.Tensor:
    """Write an adapter that PEFT has trained a little; returns what its model computes."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    if rows:
        model.resize_token_embeddings(rows)
    adapted = get_peft_model(
        model, PeftConfig(r=4, lora_alpha=8, **{"target_modules": "all-linear", **about})
    )
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], 3e-3)
    for _ in range(5):
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.save_pretrained(folder)
    with torch.no_grad():
        return adapted.eval()(input_ids=IDS).logits


def imported(adapter: Path, out: Path, base: Path) -> tuple[Path, Any]:
    folder, _, content = import_checkpoint(adapter, out, "peft", model=base)
    return folder / "model", content


def assert_same(folder: Path, expected: torch.Tensor) -> None:
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=IDS).logits
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


STARTS: list[tuple[Any, bool]] = [(True, False), (False, True), ("gaussian", False), ("eva", False)]
STARTS += [("orthogonal", False), ("mica", False)]
STARTS += [(start, rslora) for start in ("pissa", "olora") for rslora in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(("start", "rslora"), draws.cases(STARTS, "starts", 4))
def test_starts_that_are_merged(base: Path, tmp_path: Path, start: Any, rslora: bool) -> None:
    """T11: PiSSA and OLoRA take their first product away from the base, into which they were merged."""
    expected = trained(base, tmp_path / "adapter", init_lora_weights=start, use_rslora=rslora)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.allclose(again(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
    model, _ = imported(tmp_path / "adapter", tmp_path / "out", base)
    assert_same(model, expected)
    config = ModelConfig(name=str(tmp_path / "adapter"), config=str(base))
    assert described(config) == base
    if start in ("pissa", "olora") and not rslora:  # what a run begins with
        adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        adapter["base_model_name_or_path"] = str(base)
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
        assert_same(Path(resolve_model(config, tmp_path / "cache")), expected)


@pytest.mark.parametrize(
    "start", ["pissa_niter_4", "corda", "loftq", "lora_ga", "PISSA", "of-next-year", 7, None]
)
def test_starts_that_are_refused(base: Path, tmp_path: Path, start: Any) -> None:
    """With the setting and what to do, by an import, a run, and its dry run."""
    trained(base, tmp_path / "adapter", target_modules=["q_proj"])
    edit(tmp_path / "adapter", init_lora_weights=start)
    wanted = rf"init_lora_weights = {start!r}; .*path_initial_model_for_weight_conversion"
    with pytest.raises(CheckpointError, match=wanted):
        FORMATS["peft"].read(tmp_path / "adapter", base)
    for command in (described, resolve_model):
        with pytest.raises(UsageError, match=wanted):
            command(ModelConfig(name=str(tmp_path / "adapter"), config=str(base)))


def test_every_field_of_the_installed_peft_is_known() -> None:
    """A newer PEFT that has more of them makes this fail: look at what they do."""
    assert {field.name for field in dataclasses.fields(PeftConfig)} <= ALLOWED.keys()


def edit(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


REFUSED = {
    "use_dora": True, "use_qalora": True, "fan_in_fan_out": True, "lora_bias": True, "bias": "all",
    "alpha_pattern": {"q_proj": 4}, "layer_replication": [[0, 1]], "target_parameters": ["experts.up"],
    "trainable_token_indices": [1], "use_bdlora": {"nblocks": 2}, "alora_invocation_tokens": [1],
    "arrow_config": {"top_k": 1}, "kasa_config": {"beta": 1}, "velora_config": {"scale": 1},
    "monteclora_config": {"x": 1}, "ensure_weight_tying": True, "megatron_config": {"x": 1},
    "peft_type": "LOHA", "use_rslora": "yes", "r": -1, "of_next_year": "on", "other_of_next_year": 0,
}  # fmt: skip


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_more_than_a_product_is_refused_by_name(base: Path, tmp_path: Path, field: str) -> None:
    trained(base, tmp_path, target_modules=["q_proj"])
    edit(tmp_path, **{field: REFUSED[field]})
    with pytest.raises(CheckpointError, match=f"adapter_config.json has {field} = .*merge_and_unload"):
        adapter_settings(tmp_path)


@pytest.mark.parametrize("nothing", [None, False, "", [], {}])
def test_a_field_of_a_newer_peft_that_says_nothing_is_fine(base: Path, tmp_path: Path, nothing: Any) -> None:
    trained(base, tmp_path, target_modules=["q_proj"])
    edit(tmp_path, of_next_year=nothing)
    assert adapter_settings(tmp_path)["of_next_year"] == nothing


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
@given(field=st.sampled_from([*ALLOWED, "unknown", None]), value=JSON)
def test_any_value_is_merged_or_refused_with_a_reason(tmp_path: Path, field: str | None, value: Any) -> None:
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "init_lora_weights": True}
    about = value if field is None else plain | {field: value}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    try:
        found = adapter_settings(tmp_path)
    except CairnError as error:
        known, found = str(tmp_path) in str(error), plain
    else:
        known = True
    assert known
    assert found["peft_type"] == "LORA"


# What an adapter holds beside products


def test_an_adapter_that_untied_its_base(tied_base: Path, tmp_path: Path) -> None:
    """Both embeddings are trained in full: PEFT trains copies, so the merged model has two matrices."""
    kept = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    expected = trained(tied_base, tmp_path / "adapter", **kept)
    model, content = imported(tmp_path / "adapter", tmp_path / "out", tied_base)
    assert any("tie_word_embeddings is false now" in line for line in content.said)
    assert_same(model, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_were_added_widen_the_base(base: Path, tied_base: Path, tmp_path: Path, tied: bool) -> None:
    """T24: "another shape than the base's", with no word of what to do."""
    of = tied_base if tied else base
    tokenizer = AutoTokenizer.from_pretrained(of)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    rows = len(tokenizer)
    expected = trained(of, tmp_path / "adapter", rows, target_modules=["q_proj"])
    tokenizer.save_pretrained(tmp_path / "adapter")
    model, content = imported(tmp_path / "adapter", tmp_path / "out", of)
    assert f"config.json: vocab_size is {rows} now" in content.said[0]
    assert json.loads((model / "config.json").read_text())["vocab_size"] == rows
    assert len(AutoTokenizer.from_pretrained(model)) == rows
    assert_same(model, expected)


def test_rows_that_only_one_embedding_has_are_refused_with_what_to_do(base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path, 120, target_modules=["q_proj"])
    weights = load_file(tmp_path / "adapter_model.safetensors")
    del weights["base_model.model.lm_head.weight"]
    save_file(weights, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    wanted = r"120 rows .* lm_head.weight; resize the base .*resize_token_embeddings\(120\)"
    with pytest.raises(CheckpointError, match=wanted):
        FORMATS["peft"].read(tmp_path, base)


@pytest.mark.parametrize("own", ["tokenizer", "template", "config"])
def test_an_adapters_own_tokenizer_and_template_go_first(base: Path, tmp_path: Path, own: str) -> None:
    """T24: they were left out, without a word."""
    trained(base, tmp_path / "adapter", target_modules=["q_proj"])
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "of the adapter {{ messages }}"
    if own == "tokenizer":
        tokenizer.save_pretrained(tmp_path / "adapter")
    elif own == "template":
        (tmp_path / "adapter" / "chat_template.jinja").write_text(tokenizer.chat_template)
    else:
        about = json.loads((base / "tokenizer_config.json").read_text())
        about["chat_template"] = tokenizer.chat_template
        (tmp_path / "adapter" / "tokenizer_config.json").write_text(json.dumps(about))
    model, content = imported(tmp_path / "adapter", tmp_path / "out", base)
    assert content.said[-1].startswith("the adapter's own go before the base's: ")
    found = AutoTokenizer.from_pretrained(model)
    assert found.chat_template == tokenizer.chat_template
    assert found.get_vocab() == tokenizer.get_vocab()
    config = ModelConfig(name=str(tmp_path / "adapter"), config=str(base))
    resolved = resolve_model(config, tmp_path / "cache")
    assert AutoTokenizer.from_pretrained(resolved).chat_template == tokenizer.chat_template


def test_names_of_a_compiled_model_are_taken_apart(base: Path, tmp_path: Path) -> None:
    expected = trained(base, tmp_path / "adapter", target_modules=["q_proj"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = {name.replace("base_model.model.", "base_model.model._orig_mod."): one
               for name, one in load_file(path).items()}  # fmt: skip
    save_file(weights, path, {"format": "pt"})
    model, _ = imported(tmp_path / "adapter", tmp_path / "out", base)
    assert_same(model, expected)
