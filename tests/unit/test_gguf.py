"""GGUF files: written with gguf, opened by transformers' own loader, read back, refused where hostile."""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import draws
import numpy as np
import pytest
import torch
from families import FAMILIES
from runs import Finished
from safetensors.torch import load_file
from tiny import random_model, tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.formats import WriteOptions, format_of, no_progress
from cairn.formats.gguf.gguf import Gguf
from cairn.formats.gguf.gguf_file import read_gguf
from cairn.formats.gguf.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_metadata, write_tokenizer
from cairn.formats.transfer.export_step import content_of_step, export
from cairn.formats.transfer.import_step import import_checkpoint
from cairn.launch import main
from cairn.run.errors import UsageError

gguf = pytest.importorskip("gguf", reason="the dependency group formats is not installed")

VOCABULARY = 320
TEXT = "It's the 1st of 2026 — naïve Zoë's  café, 東京!\n\n  def f(x):\n\treturn x+1  # don't\r\n<|im_end|>ok"
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
CHANGES: dict[str, dict[str, Any]] = {
    "llama3": {"rope_parameters": LLAMA3, "head_dim": 48},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "yarn": {"rope_parameters": YARN},
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma2": {"num_hidden_layers": 3},
}
MODELS = [
    "llama",
    "llama_bias",
    "llama3",
    "qwen2",
    "qwen3",
    "qwen3_tied",
    "linear",
    "yarn",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
]


def bpe(name: str = "qwen2") -> PreTrainedTokenizerFast:
    """A byte-level BPE of GGUF's pre-tokenizer `name`, trained on a few sentences."""
    pattern, digits, whole_pieces = PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_pieces))
    if name.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = by_bytes
    if digits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), by_bytes])
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 4,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [TEXT * 3, "the cat sat on the mat, and then the hat was flat. 12345 678 " * 5], trainer
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token="<|endoftext|>",
    )
    made.chat_template = CHAT
    return made


def model_of(family: str) -> PreTrainedModel:
    base = {"llama3": "llama", "linear": "llama", "yarn": "qwen3"}.get(family, family)
    changes = {"vocab_size": VOCABULARY, **CHANGES.get(family, {})}
    old = FAMILIES[base].settings
    settings = {**old, **changes}
    if "num_hidden_layers" in changes and "layer_types" in old:
        settings.pop("layer_types")
    model = random_model(AutoConfig.for_model(FAMILIES[base].model_type, **settings), 3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.1
    return model.eval()


def hub_folder(family: str, folder: Path) -> Path:
    model_of(family).save_pretrained(folder)
    bpe().save_pretrained(folder)
    return folder


def a_step(source: Path, run: Path) -> Path:
    return import_checkpoint(source, run, "hf")[0]


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def step(family: str, tmp_path: Path) -> Path:
    return a_step(hub_folder(family, tmp_path / "hf"), tmp_path / "run")


IDS = torch.arange(40).reshape(2, 20) * 7 % 300 + 5


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def opened(folder: Path, step: Path) -> PreTrainedModel:
    """By transformers' own loader."""
    config = AutoConfig.from_pretrained(step / "model")
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def greedy(model: PreTrainedModel) -> list[int]:
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(IDS[:1], **settings)[0].tolist()


def compared(one: Path, other: Path, *, exact: bool = True) -> None:
    """Compare the weights of two steps."""
    ours, theirs = (load_file(step / "model" / "model.safetensors") for step in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if exact or "norm" not in name:
            assert torch.equal(theirs[name], tensor), name
        assert torch.allclose(theirs[name], tensor, atol=2.0**-22), name


@pytest.mark.slow
def test_programs_compute_the_same(family: str, step: Path, tmp_path: Path):
    """Transformers' loader, which has no Gemma 1; and a run that begins from what is imported again."""
    found = export(step, tmp_path / "out", "gguf", WriteOptions())
    assert "read back and equal" in found
    ours = AutoModelForCausalLM.from_pretrained(step / "model", attn_implementation="eager")
    if family != "gemma":
        theirs = opened(tmp_path / "out", step)
        assert torch.allclose(logits(ours), logits(theirs), atol=1e-5)
        assert greedy(ours) == greedy(theirs)
    assert format_of(tmp_path / "out") == "gguf"
    given = step / "model" if family == "llama3" else None
    again, manifest, _ = import_checkpoint(tmp_path / "out", tmp_path / "again", "gguf", model=given)
    assert manifest.parts == ["model"]
    compared(step, again, exact=not family.startswith("gemma"))
    model = AutoModelForCausalLM.from_pretrained(again / "model", attn_implementation="eager")
    assert torch.allclose(logits(ours), logits(model), atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(again / "model")
    assert tokenizer.chat_template == CHAT
    assert tokenizer(TEXT).input_ids == bpe()(TEXT).input_ids
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"], indirect=True)
@pytest.mark.parametrize("kind", draws.cases(["F16", "BF16", "Q8_0"], "smaller types", 1))
def test_smaller_types(step: Path, tmp_path: Path, kind: str):
    """Matrices are in the type asked for, and vectors float32; what is computed is as near as the type."""
    options = WriteOptions(quantize="q8_0") if kind == "Q8_0" else WriteOptions(dtype=kind)
    export(step, tmp_path / "out", "gguf", options)
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    for tensor in reader.tensors:
        router = kind == "Q8_0" and "ffn_gate_inp" in tensor.name
        assert tensor.tensor_type.name == ("F32" if len(tensor.shape) == 1 or router else kind)
    ours = AutoModelForCausalLM.from_pretrained(step / "model", attn_implementation="eager")
    theirs = opened(tmp_path / "out", step)
    assert 0 < (logits(ours) - logits(theirs)).abs().mean() < 0.06 < logits(ours).abs().mean()
    again, _, _ = import_checkpoint(tmp_path / "out" / "model.gguf", tmp_path / "again", "gguf")
    assert torch.allclose(
        logits(
            AutoModelForCausalLM.from_pretrained(
                again / "model", dtype=torch.float32, attn_implementation="eager"
            )
        ),
        logits(theirs),
        atol=1e-5,
    )


SETTINGS = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    "llama": {"hidden_act": "gelu"},
    "qwen3": {"attention_bias": True},
    "qwen3_moe": {"norm_topk_prob": False},
    "gemma": {"tie_word_embeddings": False},
    "gemma2": {"query_pre_attn_scalar": 48},
    "linear": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
}


@pytest.mark.parametrize("family", SETTINGS)
def test_a_model_that_programs_would_compute_otherwise_is_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The setting that GGUF can't say is named, and nothing is left behind."""
    monkeypatch.setitem(CHANGES, family, SETTINGS[family])
    step = a_step(hub_folder(family, tmp_path / "hf"), tmp_path / "run")
    name = "rotary scaling dynamic" if family == "linear" else next(iter(SETTINGS[family]))
    with pytest.raises(CheckpointError, match=name):
        export(step, tmp_path / "out", "gguf", WriteOptions())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


@pytest.mark.parametrize("family", ["qwen3_tied"], indirect=True)
def test_a_config_of_another_model_is_refused(step: Path, tmp_path: Path):
    """What the metadata says must be what the config.json that is given says."""
    export(step, tmp_path / "out", "gguf", WriteOptions())
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((step / "model" / "config.json").read_text())
    for changed in ({"head_dim": 64, "num_attention_heads": 1}, {"rms_norm_eps": 1e-5}):
        (other / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(CheckpointError, match=next(iter(changed))):
            import_checkpoint(tmp_path / "out", tmp_path / "again", "gguf", model=other)
    (other / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    with pytest.raises(CheckpointError, match="holds a qwen3"):
        import_checkpoint(tmp_path / "out", tmp_path / "again", "gguf", model=other)


# Tokenizers


def sentencepiece(folder: Path) -> PreTrainedTokenizerFast:
    """A BPE with byte fallback and Gemma's way with spaces."""
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("a", "t")]
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{n:02X}>" for n in range(256)), "\u2581"]
    pieces += [*"abcdefgh tuvw".replace(" ", ""), *("".join(pair) for pair in merges)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    made.save_pretrained(folder)
    return made


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_a_byte_level_tokenizer_is_recognised_by_its_definition(name: str, tmp_path: Path):
    tokenizer = bpe(name)
    tokenizer.save_pretrained(tmp_path)
    values = tokenizer_metadata(tmp_path, VOCABULARY)
    same = [other for other, how in PRE_TOKENIZERS.items() if how == PRE_TOKENIZERS[name]]
    assert values["tokenizer.ggml.pre"] == same[0], "the first of those that split alike"
    assert len(values["tokenizer.ggml.tokens"]) == VOCABULARY
    assert values["tokenizer.ggml.token_type"].count(3) == 3
    values["tokenizer.ggml.pre"] = name
    write_tokenizer(values, tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again(TEXT).input_ids == tokenizer(TEXT).input_ids
    assert again.decode(again(TEXT).input_ids) == TEXT


def test_a_tokenizer_with_bytes_for_unknown_characters(tmp_path: Path):
    """Its scores follow the order of merges, and its bytes are marked."""
    sentencepiece(tmp_path)
    values = tokenizer_metadata(tmp_path, 300)
    tokens, scores = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"]
    by_score = sorted(("th", "the", "\u2581the", "at"), key=lambda token: -scores[tokens.index(token)])
    assert by_score == ["th", "the", "\u2581the", "at"]
    assert values["tokenizer.ggml.token_type"].count(6) == 256
    assert values["tokenizer.ggml.add_space_prefix"] is False
    path = tmp_path / "tokenizer.json"
    definition = json.loads(path.read_text())
    definition["model"]["merges"].remove(["\u2581", "the"])
    path.write_text(json.dumps(definition))
    with pytest.raises(CheckpointError, match="are not merged, though"):
        tokenizer_metadata(tmp_path, 300)


def test_one_token_a_character(tmp_path: Path):
    tokenizer().save_pretrained(tmp_path)
    values = tokenizer_metadata(tmp_path, 102)
    assert values["tokenizer.ggml.tokens"][6:9] == ["\u2581", "!", '"']
    assert values["tokenizer.ggml.model"] == "llama"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
            "splits text",
        ),
        ({"normalizer": {"type": "Lowercase"}}, "it changes text with"),
        ({"model": {"type": "Unigram", "vocab": []}}, "Unigram"),
    ],
)
def test_a_tokenizer_that_programs_do_not_know_is_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
):
    bpe().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=reason):
        tokenizer_metadata(tmp_path, VOCABULARY)


# Files from elsewhere


def text_of(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def file_of(values: bytes = b"", tensors: bytes = b"", *, counts: tuple[int, int] = (0, 0)) -> bytes:
    """A file of gguf's version 3 with this metadata and table; `counts` of tensors and of values."""
    header = b"GGUF" + struct.pack("<IQQ", 3, *counts) + values + tensors
    return header + bytes(-len(header) % 32) + bytes(64)


ARRAY = text_of("a") + struct.pack("<I", 9)
HOSTILE = {
    "too short": b"GGUF",
    "not a GGUF file": b"GGML" + bytes(60),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "a string beyond the file": file_of(struct.pack("<Q", 2**62), counts=(0, 1)),
    "values without end": file_of(counts=(0, 2**60)),
    "tensors without end": file_of(counts=(2**60, 0)),
    "numbers without end": file_of(ARRAY + struct.pack("<IQ", 0, 2**60), counts=(0, 1)),
    "strings without end": file_of(ARRAY + struct.pack("<IQ", 8, 2**40), counts=(0, 1)),
    "arrays in arrays": file_of(ARRAY + struct.pack("<IQ", 9, 2**40), counts=(0, 1)),
    "a key twice": file_of((text_of("a") + struct.pack("<IB", 0, 1)) * 2, counts=(0, 2)),
    "no text": file_of(struct.pack("<Q", 2) + b"\xff\xff" + struct.pack("<IB", 0, 1), counts=(0, 1)),
    "a tensor beyond the file": file_of(
        tensors=text_of("t") + struct.pack("<IQIQ", 1, 2**40, 0, 0), counts=(1, 0)
    ),
    "tensors in each other": file_of(
        tensors=(text_of("t") + struct.pack("<IQIQ", 1, 8, 0, 0))
        + (text_of("u") + struct.pack("<IQIQ", 1, 8, 0, 16)),
        counts=(2, 0),
    ),
    "a tensor twice": file_of(
        tensors=(text_of("t") + struct.pack("<IQIQ", 1, 2, 0, 0))
        + (text_of("t") + struct.pack("<IQIQ", 1, 2, 0, 32)),
        counts=(2, 0),
    ),
    "dimensions without end": file_of(tensors=text_of("t") + struct.pack("<I", 2**31), counts=(1, 0)),
    "an alignment of three": file_of(text_of("general.alignment") + struct.pack("<II", 4, 3), counts=(0, 1)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused(what: str, tmp_path: Path):
    path = tmp_path / "x.gguf"
    path.write_bytes(HOSTILE[what])
    with pytest.raises(Damaged):
        import_checkpoint(path, tmp_path / "run", "gguf")
    assert not (tmp_path / "run").exists()


READ = [
    kind for kind in gguf.GGMLQuantizationType if kind in gguf.quants._type_traits and kind.name != "BF16"
]
"""The quantisations that gguf can take apart: Q4_0 to MXFP4."""


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.name)
def test_a_quantised_tensor_is_what_gguf_makes_of_its_blocks(
    kind: gguf.GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Read in pieces that begin and end within blocks; blocks that gguf can't write are random bytes."""
    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    shape, drawn = (6, 3 * values), np.random.default_rng(7)
    try:
        blocks = gguf.quantize(drawn.standard_normal(shape, dtype=np.float32), kind)
    except NotImplementedError:
        blocks = drawn.integers(0, 60, (shape[0], 3 * nbytes), dtype=np.uint8)  # no scale is infinite
    table = text_of("t") + struct.pack("<I2QIQ", 2, *reversed(shape), kind, 0)
    path = tmp_path / "x.gguf"
    path.write_bytes(file_of(tensors=table, counts=(1, 0))[:-64] + blocks.tobytes())
    source = read_gguf(path).tensors["t"]
    assert (source.spec.shape, source.spec.dtype) == (shape, "F32")
    expected = torch.from_numpy(gguf.dequantize(blocks, kind)).reshape(-1)
    assert expected.isfinite().all()
    assert expected.unique().numel() > 2
    monkeypatch.setattr("cairn.formats.gguf.gguf_file.AT_ONCE", values)
    for first, count in ((0, len(expected)), (values - 1, 2), (5, values), (values, 3 * values + 1)):
        found = torch.empty(count)
        source.fill(first, found)
        assert torch.equal(found, expected[first : first + count])


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_a_run_begins_from_a_file_with_several_quantisations(step: Path, tmp_path: Path):
    """As llama-quantize mixes them: what is imported is what transformers' loader makes of the file."""
    export(step, tmp_path / "out", "gguf", WriteOptions())
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    path = tmp_path / "mixed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            element = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], element)
    kinds = [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q5_1, gguf.GGMLQuantizationType.Q8_0]
    for number, tensor in enumerate(reader.tensors):
        kind = kinds[number % 3] if len(tensor.shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(tensor.data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, _, _ = import_checkpoint(path, tmp_path / "again", "gguf")
    again = load_file(found / "model" / "model.safetensors")
    ours = load_file(step / "model" / "model.safetensors")
    assert again.keys() == ours.keys()
    for name, tensor in ours.items():
        assert torch.allclose(again[name], tensor, atol=0.2 * float(tensor.abs().max())), name
    assert any(not torch.equal(again[name], tensor) for name, tensor in ours.items())


def test_other_quantisations_and_models_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.gguf"

    def with_tensor_of(kind: int) -> None:
        table = text_of("t") + struct.pack("<IQIQ", 1, 256, kind, 0)
        path.write_bytes(file_of(tensors=table, counts=(1, 0)))

    for kind, name in ((15, "Q8_K"), (26, "I32"), (99, "type 99")):
        with_tensor_of(kind)
        with pytest.raises(CheckpointError, match=rf"tensors in {name}, which is not read: t"):
            import_checkpoint(path, tmp_path / "run", "gguf")
    with_tensor_of(12)
    with pytest.raises(Damaged, match="lies outside the file"):
        import_checkpoint(path, tmp_path / "run", "gguf")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        with pytest.raises(UsageError, match="uv sync --group formats"):
            import_checkpoint(path, tmp_path / "run", "gguf")
    name = text_of("general.architecture") + struct.pack("<I", 8) + text_of("mamba")
    path.write_bytes(file_of(name, counts=(0, 1)))
    with pytest.raises(CheckpointError, match="architecture 'mamba' can't be read"):
        import_checkpoint(path, tmp_path / "run", "gguf")


@pytest.mark.parametrize("family", ["qwen3_tied"], indirect=True)
def test_what_was_damaged_on_the_way_is_found(step: Path, tmp_path: Path):
    """The check after writing compares every weight."""
    content, path = content_of_step(step), tmp_path / "model.gguf"
    verify = Gguf().write(content, tmp_path, WriteOptions(quantize="q8_0"))
    data = bytearray(path.read_bytes())
    data[-300] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(Damaged, match="differs from what was written"):
        verify(no_progress)


# Commands


@pytest.mark.parametrize("family", ["qwen3_tied"], indirect=True)
def test_the_commands(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Export and import; a format without quantisation, two types at once, and a package that is missing."""

    def ckpt(*arguments: object) -> Finished:
        monkeypatch.setattr("sys.argv", ["ckpt", *map(str, arguments)])
        code = main.ckpt()
        captured = capsys.readouterr()
        return Finished(code, captured.out + captured.err)

    out = tmp_path / "out"
    finished = ckpt("export", step, out, "--format", "gguf", "--quantize", "q8_0")
    assert finished.code == 0, finished.output
    assert "equal within the rounding of Q8_0" in finished.output
    finished = ckpt("import", out / "model.gguf", tmp_path / "again")
    assert (finished.code, "has the format gguf, by its files" in finished.output) == (0, True), (
        finished.output
    )
    other = tmp_path / "other"
    finished = ckpt("export", step, other, "--quantize", "q8_0")
    assert (finished.code, "hf has no quantisation q8_0" in finished.output) == (2, True)
    finished = ckpt("export", step, other, "--format", "gguf", "--quantize", "q8_0", "--dtype", "float16")
    assert (finished.code, "can't both be asked for" in finished.output) == (2, True)
    monkeypatch.setitem(sys.modules, "gguf", None)
    finished = ckpt("export", step, other, "--format", "gguf")
    assert (finished.code, "uv sync --group formats" in finished.output) == (2, True), finished.output
