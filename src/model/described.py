"""config.json of a model, carried over from where it came from: only what has changed is changed.

transformers 5 writes rotary settings and the data type under other names than transformers 4, and reads both.
Programs that rest on transformers 4, and others that read config.json themselves, know the older names alone,
and take defaults for what they don't find. So a config.json that Cairn writes has both.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cairn.run.files import read_json

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
