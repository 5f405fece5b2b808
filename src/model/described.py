"""config.json of a model, carried over from where it came from: only what has changed is changed.

transformers 5 writes rotary settings and the data type under other names than transformers 4, and reads both.
Programs that rest on transformers 4, and others that read config.json themselves, know the older names alone,
and take defaults for what they don't find. So a config.json that Cairn writes has both.
"""

import copy
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cairn.checkpoint.checksums import READ_BYTES, crc64
from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.tensors.layout import find_tensors
from cairn.checkpoint.tensors.source import TensorSource
from cairn.run.files import DamagedFile, read_json, write_json
from cairn.run.recipe import TEMPLATES, tokenizer_files

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

About = dict[str, Any]
"""The content of a config.json."""
FILE_NAME = "config.json"
LAYER_TYPES = ("full_attention", "sliding_attention")
OWN_NAMES: Mapping[str, Mapping[str, str]] = {
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "gpt_neox_japanese": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
}
"""What transformers 4 calls rotary settings in some families, by `model_type`."""
PASSING = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"})
"""Entries of a configuration in memory that say nothing of the model."""


def about_model(folder: Path) -> About:
    """The content of a folder's config.json; empty if there is none.

    Raises:
        DamagedFile: it is damaged, or no JSON object.
    """
    return read_json(folder / FILE_NAME, dict[str, Any]) or {}


def as_file(about: Mapping[str, Any]) -> bytes:
    """The bytes of a config.json."""
    return (json.dumps(about, indent=2) + "\n").encode()


def carried_over(
    source: Mapping[str, Any] | None, config: "PreTrainedConfig", dtype: "torch.dtype | None"
) -> bytes:
    """The config.json of a model in memory, in the form of the file that it was made from.

    Args:
        source: the content of that file; None: the model was made otherwise.
        config: that of the model in memory. What differs from `source` replaces it.
        dtype: the data type of the weights beside the file; None: what `source` says.
    """
    about = _as_written(config) if source is None else _changed(dict(copy.deepcopy(source)), config)
    about = with_both_forms(about)
    return as_file(about if dtype is None else with_dtype(about, dtype))


def with_both_forms(about: Mapping[str, Any]) -> About:
    """A configuration with its rotary settings and data types under the names of transformers 4 and 5.

    What it says already stays as it is.
    """
    both = dict(about)
    for key, value in both.items():
        if isinstance(value, dict) and key.endswith("_config"):
            both[key] = with_both_forms(cast("About", value))
    dtype = both.get("dtype", both.get("torch_dtype"))
    if isinstance(dtype, str):
        both |= {"dtype": dtype, "torch_dtype": dtype}
    if both.get("model_type") == "qwen3_moe" and "num_local_experts" in both:
        both.setdefault("num_experts", both["num_local_experts"])
    for name, value in _older_rotary(both).items():
        both.setdefault(name, value)
    return both


def with_dtype(about: Mapping[str, Any], dtype: "torch.dtype") -> About:
    """A configuration of weights of this data type, and so are its parts that name one."""
    name = str(dtype).removeprefix("torch.")
    parts = {
        key: with_dtype(cast("About", part), dtype)
        for key, part in about.items()
        if isinstance(part, dict) and ("dtype" in part or "torch_dtype" in part)
    }
    return {**about, **parts, "dtype": name, "torch_dtype": name}


def with_changes(about: Mapping[str, Any], changes: Mapping[str, Any]) -> About:
    """A configuration with other values of these entries, in the part for text too, where that has them."""
    text = about.get("text_config")
    if not isinstance(text, dict):
        return {**about, **changes}
    inner = cast("About", text)
    beside = {key: value for key, value in changes.items() if key in about or key == "tie_word_embeddings"}
    return {**about, **beside, "text_config": {**inner, **changes}}


def _as_written(config: "PreTrainedConfig", *, defaults: bool = False) -> About:
    """What transformers writes of a configuration, if asked with all that is as in any."""
    return cast("About", json.loads(config.to_json_string(use_diff=not defaults)))


def _changed(source: About, config: "PreTrainedConfig") -> About:
    """The content of a file, with the entries that are others in memory than the file says."""
    decoded = config._decode_special_floats(copy.deepcopy(source))  # pyright: ignore # what its from_json_file calls
    read = type(config).from_dict(decoded)  # pyright: ignore # typed in part
    before, now = _as_written(read, defaults=True), _as_written(config, defaults=True)
    others = {key: value for key, value in now.items() if key not in PASSING and before.get(key) != value}
    return source | others


def _older_rotary(about: Mapping[str, Any]) -> About:
    """What transformers 4 calls the entries of `rope_parameters`."""
    found = about.get("rope_parameters")
    if not isinstance(found, dict) or about.get("rope_scaling"):
        return {}
    settings = cast("About", found)
    by_layer = [cast("About", settings[key]) for key in LAYER_TYPES if isinstance(settings.get(key), dict)]
    if any(isinstance(value, dict) for value in settings.values()) and not by_layer:
        return {}  # of kinds of layers that transformers 4 doesn't know
    whole = by_layer[0] if by_layer else settings
    names = OWN_NAMES.get(str(about.get("model_type")), {})
    older: About = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if whole.get(key) is not None:
            older[names.get(key, key)] = whole[key]
    kind = whole.get("rope_type", whole.get("type", "default"))
    rest = {key: value for key, value in whole.items() if key not in ("rope_theta", "partial_rotary_factor")}
    older["rope_scaling"] = None if kind == "default" else rest
    if len(by_layer) == len(LAYER_TYPES) and by_layer[1].get("rope_theta") != whole.get("rope_theta"):
        older["rope_local_base_freq"] = by_layer[1].get("rope_theta")
    return older


# What config.json says of the weights beside it that is not so, as their names and data types tell.


UNQUANTIZED = frozenset({"F64", "F32", "F16", "BF16", "BOOL", "I64"})
"""Data types of weights and buffers of models that are not quantised."""
WRAPPERS = re.compile(
    r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|_forward_module)\."
)
"""What torch.compile, activation checkpointing, FSDP and Lightning's strategies put into names of weights."""
LEADING = "module."
"""What DataParallel and DistributedDataParallel put before all names."""
QUANTIZATION = "quantization_config"


def is_wrapped(names: Iterable[str]) -> bool:
    """Whether names of weights have parts that stand for wrappers of modules."""
    known = list(names)
    return any(WRAPPERS.search(name) for name in known) or (
        bool(known) and all(name.startswith(LEADING) for name in known)
    )


def unwrapped(name: str, *, leading: bool) -> str:
    """The name of a weight, or of its state, without wrappers.

    Args:
        leading: whether LEADING stands before all names.
    """
    name = WRAPPERS.sub("", name)
    return WRAPPERS.sub("", name.removeprefix(LEADING)) if leading else name


def quantization_of(about: Mapping[str, Any]) -> object:
    """What a configuration says of the quantisation of its weights; None or empty if they have none."""
    text = about.get("text_config")
    inner = cast("Mapping[str, Any]", text).get(QUANTIZATION) if isinstance(text, Mapping) else None
    return about.get(QUANTIZATION) or inner


def without_quantization(about: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of weights that are not quantised."""
    kept = {key: value for key, value in about.items() if key != QUANTIZATION}
    text = kept.get("text_config")
    if isinstance(text, Mapping):
        inner = cast("Mapping[str, Any]", text)
        kept["text_config"] = {key: value for key, value in inner.items() if key != QUANTIZATION}
    return kept


def is_quantized(found: Mapping[str, TensorSource]) -> bool:
    """Whether some of a model's matrices are stored as whole numbers, or in eight bits or fewer."""
    # Masks of old files are bytes, too, and have four dimensions.
    return any(len(one.spec.shape) in (2, 3) and one.spec.dtype not in UNQUANTIZED for one in found.values())


def refuse_quantized(about: Mapping[str, Any], where: str) -> None:
    """Refuse quantised weights, such as those of gpt-oss and DeepSeek-V3: they can't be trained directly.

    Raises:
        CheckpointError: always.
    """
    said = quantization_of(about)
    kind: object = said
    if isinstance(said, Mapping):
        kind = cast("Mapping[str, Any]", said).get("quant_method", "method unknown")
    raise CheckpointError(
        f"{where}: its weights are quantized ({kind or 'as the data types of its tensors say'}), and Cairn "
        "trains float32 or bfloat16; transformers converts them: AutoModelForCausalLM.from_pretrained with "
        "the method's dequantize, then save_pretrained into a folder without quantization_config in its "
        "config.json"
    )


def disagrees(folder: Path) -> bool:
    """Whether a Hugging Face directory's safetensors files are others than its config.json says.

    Such a folder can't be read by all roles as it is; see `agreement.agree`, which corrects it.

    Raises:
        Damaged: a file is invalid.
        DamagedFile: config.json is damaged.
        CheckpointError: the weights are quantised.
    """
    try:
        found = find_tensors(folder, "model")
    except FileNotFoundError:
        return False
    about = about_model(folder)
    if quantization_of(about):
        if is_quantized(found):
            refuse_quantized(about, str(folder))
        return True
    if is_wrapped(found):
        return True
    text = about.get("text_config")
    inner: Mapping[str, Any] = cast("Mapping[str, Any]", text) if isinstance(text, Mapping) else {}
    ties = about.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
    if ties is False:
        return False
    # Only embeddings are tied: matrices with a row for each token, of which there are more than of anything.
    matrices = [one.spec.shape for one in found.values() if len(one.spec.shape) == 2]
    said = about.get("vocab_size"), inner.get("vocab_size")
    most = max((shape[0] for shape in matrices), default=0)
    embeddings = [shape for shape in matrices if shape[0] in said]
    embeddings = embeddings or [shape for shape in matrices if shape[0] == most]
    if len(embeddings) == len(set(embeddings)):
        return False
    from cairn.model.hub_layout import (
        hub_layout,  # imports torch and transformers
        tied_apart,
    )
    from cairn.model.untrusted_config import load_config

    return bool(tied_apart(found, hub_layout(load_config(folder)))[1])


# The files beside a model's weights: configuration, tokenizer, chat templates, settings of generation.


SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")
"""Files of which a folder with a whole tokenizer has at least one."""
OF_TRAINING = frozenset({"trainer_state.json"})
"""Files beside a model that belong to its training."""


def companion_files(folder: Path) -> dict[str, Path]:
    """The files beside the weights in a Hugging Face directory, by their paths in it, such as `config.json`.

    Indexes of files of weights, hidden files and what belongs to training are left out.
    """
    found = [path for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES and path.is_file()]
    own = {
        path.name: path
        for path in found
        if not path.name.startswith(".")
        and path.name not in OF_TRAINING
        and ".safetensors" not in path.name
        and not path.name.endswith(".bin.index.json")
    }
    return own | {
        f"{TEMPLATES}/{path.name}": path
        for path in sorted((folder / TEMPLATES).glob("*.jinja"))
        if path.is_file()
    }


def with_tokenizer_of(files: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Files beside weights, with the tokenizer, chat templates and settings of generation of another folder.

    What that folder has goes before what `files` have; a chat template of its own replaces all of theirs, and
    a whole tokenizer of its own leaves none of theirs.
    """
    own = {path.relative_to(folder).as_posix(): path for path in tokenizer_files(folder)}
    generation = folder / "generation_config.json"
    if generation.is_file():
        own[generation.name] = generation
    kept = dict(files)
    if any(True for pattern in VOCABULARIES for _ in folder.glob(pattern)):
        beside = next(iter(files.values())).parent if files else folder
        theirs = {path.relative_to(beside).as_posix() for path in tokenizer_files(beside)}
        kept = {name: path for name, path in kept.items() if name not in theirs or is_template(name)}
    if _has_template(own):
        kept = {name: path for name, path in kept.items() if not is_template(name)}
    return kept | own


def is_template(name: str) -> bool:
    """Whether a file beside weights holds a chat template."""
    return name.startswith(("chat_template.", f"{TEMPLATES}/"))


def _has_template(files: Mapping[str, Path]) -> bool:
    """Whether a tokenizer's files have a chat template."""
    if any(is_template(name) for name in files):
        return True
    config = files.get("tokenizer_config.json")
    if config is None:
        return False
    try:
        about: Any = json.loads(config.read_bytes())
    except (ValueError, RecursionError):  # whoever loads the tokenizer says so
        return False
    return isinstance(about, dict) and bool(cast("dict[str, Any]", about).get("chat_template"))


# Names the weights in a Hugging Face directory, so that it is noticed if they change.


def weight_files(folder: Path) -> list[Path]:
    """The files that determine what a model computes: its weights and its configuration."""
    return sorted([*folder.glob("*.safetensors"), folder / "config.json"])


def sums_of(files: Iterable[Path]) -> dict[str, str]:
    """Size and checksum (CRC-64/NVME) of each file, by its name.

    Raises:
        OSError: a file can't be read.
    """
    return {path.name: _sum_of(path) for path in files}


def _sum_of(path: Path) -> str:
    size = crc = 0
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            size, crc = size + len(data), crc64(data, crc)
    return f"{size} {crc:016x}"


def note_sums(folder: Path) -> None:
    """Note the sums of all files in a folder that is kept for later, beside it and durably.

    Raises:
        OSError: a file can't be read, or the note not be written.
    """
    write_json(_noted(folder), sums_of(_files(folder)), durable=True)


def damage_in(folder: Path) -> str | None:
    """What is wrong with a folder whose sums were noted; None if it is as it was written."""
    try:
        noted = read_json(_noted(folder), dict[str, str])
        if noted is None:
            return "no checksums of it were kept"
        names = changed(noted, sums_of(_files(folder)))
    except (DamagedFile, OSError) as error:
        return str(error)
    return f"{names[0]} is not what was written" if names else None


def _noted(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.sums.json")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def changed(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of files that differ, or are in one of both only."""
    return sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
