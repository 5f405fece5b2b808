"""The settings of PEFT with which a merged weight is W + scaling B A, and W is what the base's files hold.

The list names what is known to be right. What it does not know, such as a field that a newer PEFT has, is
refused unless it says nothing; a list of what is known to be wrong would take it for harmless.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import ADAPTER_CONFIG
from cairn.run.files import read_json

Allowed = Callable[[Any], bool]


def _anything(value: Any) -> bool:
    return True


def _one_of(*values: object) -> Allowed:
    return lambda value: any(type(value) is type(one) and value == one for one in values)


def _text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _texts(value: Any) -> bool:
    return _text(value) or (
        isinstance(value, list) and all(isinstance(one, str) for one in cast("Any", value))
    )


def _whole(value: Any) -> bool:
    return type(value) is int and value > 0


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _truth(value: Any) -> bool:
    return type(value) is bool


def _ranks(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and all(_whole(rank) for rank in cast("dict[str, Any]", value).values())
    )


PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""The values of `init_lora_weights` that leave the base as it is."""
STARTS_OF_BASE = ("pissa", "olora")
"""Those that take the first product away from the base, and compute it from the base's weights alone."""
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""What an unknown field may say."""
ALLOWED: Mapping[str, Allowed] = {
    "peft_type": _one_of("LORA"),
    "task_type": _text,
    "auto_mapping": _anything,
    "peft_version": _text,
    "base_model_name_or_path": _text,
    "revision": _text,
    "inference_mode": _truth,
    "r": _whole,
    "target_modules": _texts,
    "exclude_modules": _texts,
    "lora_alpha": _anything,  # `scaling` looks at it
    "lora_dropout": _number,
    "fan_in_fan_out": _one_of(False),
    "bias": _one_of("none"),
    "use_rslora": _truth,
    "modules_to_save": _texts,
    "init_lora_weights": _one_of(*PLAIN_STARTS, *STARTS_OF_BASE),
    "layers_to_transform": _anything,
    "layers_pattern": _texts,
    "rank_pattern": _ranks,
    "alpha_pattern": _one_of(None, {}),
    "megatron_config": _one_of(None),
    "megatron_core": _text,
    "trainable_token_indices": _one_of(None),
    "loftq_config": _anything,
    "eva_config": _anything,
    "corda_config": _anything,
    "lora_ga_config": _anything,
    "use_dora": _one_of(False),
    "velora_config": _one_of(None),
    "alora_invocation_tokens": _one_of(None),
    "use_qalora": _one_of(False),
    "qalora_group_size": _anything,
    "monteclora_config": _one_of(None),
    "layer_replication": _one_of(None),
    "runtime_config": _anything,
    "lora_bias": _one_of(False),
    "target_parameters": _one_of(None, []),
    "use_bdlora": _one_of(None, False),
    "arrow_config": _one_of(None),
    "kasa_config": _one_of(None),
    "ensure_weight_tying": _one_of(False),
}
"""By field of PEFT's LoraConfig, which values are fine. Fields that only describe a start count with
`init_lora_weights`, which says whether they were used."""
REMEDIES = {
    "init_lora_weights": (
        "this start has changed the weights of the base, and the base's files don't hold the changed ones; "
        "where it was trained, PEFT's model.save_pretrained(FOLDER, path_initial_model_for_weight_conversion="
        "the adapter before training) writes an adapter of the base as it is"
    ),
}
"""What to do about a value that is refused, by field."""


def adapter_settings(folder: Path) -> dict[str, Any]:
    """PEFT's configuration of the adapter in `folder`, with which a merged weight is W + scaling B A.

    Raises:
        CheckpointError: it has a setting with which there is more to it; the message names all of them.
        DamagedFile: the file is damaged, or no JSON object.
    """
    about = read_json(folder / ADAPTER_CONFIG, dict[str, Any]) or {}
    odd = [key for key, value in about.items() if not _is_allowed(key, value)]
    if "peft_type" not in about:
        raise Damaged(f"{folder / ADAPTER_CONFIG}: has no peft_type, so it is no adapter's")
    if odd:
        remedies = [REMEDIES[key] for key in odd if key in REMEDIES]
        raise CheckpointError(
            f"{folder}: this adapter can't be merged here: its {ADAPTER_CONFIG} has "
            + ", ".join(f"{key} = {_short(about[key])}" for key in odd)
            + "; "
            + "; ".join(remedies or ["PEFT's merge_and_unload can do that"])
        )
    return about


def start_of_base(about: Mapping[str, Any]) -> str | None:
    """The start whose first product is to be taken away from the base: one of STARTS_OF_BASE, or None."""
    start = about.get("init_lora_weights")
    return start if start in STARTS_OF_BASE else None


def scaling(about: Mapping[str, Any], rank: int, folder: Path) -> float:
    """What the product of two matrices of rank `rank` is multiplied by, from the adapter's configuration.

    Raises:
        Damaged: the configuration does not say.
    """
    alpha, root = about.get("lora_alpha"), about.get("use_rslora", False)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise Damaged(f"{folder / ADAPTER_CONFIG}: has lora_alpha = {alpha!r}, which is no positive number")
    return alpha / (math.sqrt(rank) if root else rank)


def _is_allowed(key: str, value: Any) -> bool:
    allowed = ALLOWED.get(key)
    if allowed is None:
        return any(type(value) is type(one) and value == one for one in NOTHING)
    return allowed(value)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
