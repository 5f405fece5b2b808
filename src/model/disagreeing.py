"""What config.json says of the weights beside it that is not so, as their names and data types tell.

Programs leave such folders behind: a merged adapter of a quantised base keeps its `quantization_config`, one
that trained both embeddings keeps `tie_word_embeddings`, and the names in a compiled model have a prefix.
`agreement` corrects them; this module only looks.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.tensors.layout import find_tensors
from cairn.checkpoint.tensors.source import TensorSource
from cairn.model.described import about_model

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
    rows = [one.spec.shape for one in found.values() if len(one.spec.shape) == 2]
    twice = max((shape for shape in rows if rows.count(shape) > 1), default=(0, 0))
    if ties is False or twice[0] < max((shape[0] for shape in rows), default=0):
        return False
    from cairn.model.hub_layout import hub_layout  # imports torch and transformers
    from cairn.model.tied_weights import tied_apart
    from cairn.model.untrusted_config import load_config

    return bool(tied_apart(found, hub_layout(load_config(folder)))[1])
