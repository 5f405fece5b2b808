"""Brings a checkpoint's weights and its config.json to agree where they don't, and says how.

Nothing that could be checked is assumed: a copy of a tied weight is compared with what it is a copy of, data
types tell whether weights are quantised, and names without a place in the model are left out only if they are
buffers that every model of the kind computes anew.
"""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL, OPTIMIZER
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.model.described import FILE_NAME, about_model, as_file, with_changes
from cairn.model.disagreeing import (
    LEADING,
    is_quantized,
    is_wrapped,
    quantization_of,
    refuse_quantized,
    unwrapped,
    without_quantization,
)
from cairn.model.hub_layout import Layout, hub_layout
from cairn.model.tied_weights import tied_apart
from cairn.model.untrusted_config import load_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

COMPUTED = re.compile(r"(?:^|\.)rotary_emb\.(?:inv_freq|cos_cached|sin_cached)$|(?:^|\.)position_ids$")
"""Buffers that every model of transformers computes by itself; older versions saved them."""
COMPUTED_BY_KIND: Mapping[str, re.Pattern[str]] = {
    kind: re.compile(rf"(?:^|\.){pattern}$")
    for kinds, pattern in (
        (("gpt2", "gpt_bigcode", "gptj", "codegen", "imagegpt"), r"attn\.(?:bias|masked_bias|causal_mask)"),
        (("gpt_neo",), r"attn\.attention\.(?:bias|masked_bias)"),
        (("gpt_neox", "gpt_neox_japanese"), r"attention\.(?:bias|masked_bias)"),
        (("xglm",), r"embed_positions\.weights"),
    )
    for kind in kinds
}
"""The same of some families, by `model_type`: masks and positions."""


@dataclass(frozen=True)
class Agreed:
    """Weights, and the config.json and layout that fit them.

    tensors: by stem and name, as in `Content`. said: what was corrected or passed over, one sentence each.
    """

    config: "PreTrainedConfig"
    about: dict[str, Any]
    layout: Layout
    tensors: Mapping[str, Mapping[str, TensorSource]]
    said: tuple[str, ...]


def agree(
    tensors: Mapping[str, Mapping[str, TensorSource]],
    folder: Path,
    where: Path,
    changes: Mapping[str, Any] | None = None,
) -> Agreed:
    """What `tensors` and the config.json in `folder` say of a model, corrected where they contradict.

    Args:
        tensors: by stem and name; those of the model and of its optimiser are looked at.
        where: the source, for messages.
        changes: entries of config.json that are others than the file has.

    Raises:
        CheckpointError: the weights are quantised, or the names of two become the same.
        Damaged: config.json is no model's, or a file is damaged.
        DamagedFile: config.json is damaged.
    """
    said: list[str] = []
    about = about_model(folder)
    config = load_config(folder)
    if changes:
        about = with_changes(about, changes)
        config = _as_config(about, where)
    found = tensors.get(MODEL, {})
    if is_quantized(found):
        refuse_quantized(about, str(where))
    if quantization_of(about):
        about = without_quantization(about)
        config = _as_config(about, where)
        said.append(
            "config.json: quantization_config is dropped: the weights are not quantized, by their data types"
        )
    by_stem = {stem: dict(named) for stem, named in tensors.items()}
    said += _unwrap(by_stem, where)
    layout = hub_layout(config)
    said += _fit_names(by_stem, layout, where)
    copies, apart = tied_apart(by_stem.get(MODEL, {}), layout)
    if apart:
        about = with_changes(about, {"tie_word_embeddings": False})
        config = _as_config(about, where)
        layout = hub_layout(config)
        if still := sorted(set(apart) & (layout.tied.keys() | layout.tied_in_memory.keys())):
            raise CheckpointError(
                f"{where}: {still[0]} differs from {apart[still[0]]}, to which {config.model_type} always "
                "ties it; remove the one that is not meant"
            )
        name, of = next(iter(apart.items()))
        said.append(
            f"config.json: tie_word_embeddings is false now: {name} differs from {of}, so both are kept"
        )
    for name in copies:
        by_stem[MODEL].pop(name)
    said += _pass_over(by_stem, layout, str(about.get("model_type")))
    return Agreed(config, about, layout, by_stem, tuple(said))


def _as_config(about: Mapping[str, Any], where: Path) -> "PreTrainedConfig":
    """A configuration of this content.

    Raises:
        Damaged: it is no model's.
    """
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / FILE_NAME).write_bytes(as_file(about))
        try:
            return load_config(Path(temporary))
        except Damaged as error:
            raise Damaged(str(error).replace(temporary, str(where))) from None


def _unwrap(by_stem: dict[str, dict[str, TensorSource]], where: Path) -> list[str]:
    """Take the parts that stand for wrappers out of all names; returns what is to be said."""
    names = by_stem.get(MODEL, {}).keys()
    if not is_wrapped(names):
        return []
    leading = all(unwrapped(name, leading=False).startswith(LEADING) for name in names)
    example = next(name for name in names if unwrapped(name, leading=leading) != name)
    _rename(by_stem, {name: unwrapped(name, leading=leading) for name in names}, where)
    return [f"names of wrapped modules: {example} is taken for {unwrapped(example, leading=leading)}"]


def _fit_names(by_stem: dict[str, dict[str, TensorSource]], layout: Layout, where: Path) -> list[str]:
    """Take away a first part that all names have, if then every weight of the model is there.

    Such is the attribute of Lightning's module, or of another class, in which the model is.
    """
    found = by_stem.get(MODEL, {})
    firsts = {name.partition(".")[0] for name in found}
    if len(firsts) != 1:
        return []
    prefix = firsts.pop() + "."
    short = {name: name.removeprefix(prefix) for name in found}
    lacking, strange = _unfit(found.keys(), layout)
    if not lacking and not strange:
        return []
    lacking_then, strange_then = _unfit(short.values(), layout)
    if lacking_then or (not lacking and strange_then >= strange):
        return []
    _rename(by_stem, short, where)
    return [f"all names begin with {prefix}, which is taken away"]


def _unfit(names: Iterable[str], layout: Layout) -> tuple[int, int]:
    """How many weights of the model are not among these names, and how many names are of none."""
    found = set(names)
    places = layout.find(found)
    strange = found - places.keys() - layout.tied.keys() - layout.tied_in_memory.keys()
    return len(places.keys() - found), len(strange)


def _rename(by_stem: dict[str, dict[str, TensorSource]], names: Mapping[str, str], where: Path) -> None:
    """Give weights other names, and their state in the optimiser with them.

    Raises:
        CheckpointError: two become the same.
    """
    if len(set(names.values())) < len(names):
        seen: dict[str, str] = {}
        for name, short in names.items():
            if short in seen:
                raise CheckpointError(
                    f"{where}: has both {seen[short]} and {name}, which are the same weight"
                )
            seen[short] = name
    by_stem[MODEL] = {names[name]: source for name, source in by_stem[MODEL].items()}
    if OPTIMIZER in by_stem:
        state: dict[str, TensorSource] = {}
        for name, source in by_stem[OPTIMIZER].items():
            weight, dot, kind = name.rpartition(".")
            state[f"{names.get(weight, weight)}{dot}{kind}"] = source
        by_stem[OPTIMIZER] = state


def _pass_over(by_stem: dict[str, dict[str, TensorSource]], layout: Layout, kind: str) -> list[str]:
    """Leave out buffers that the model computes by itself; returns what is to be said."""
    found = by_stem.get(MODEL, {})
    known = layout.find(found.keys()).keys() | layout.tied.keys() | layout.tied_in_memory.keys()
    of_kind = COMPUTED_BY_KIND.get(kind)
    computed = [
        name
        for name in found
        if name not in known and (COMPUTED.search(name) or (of_kind and of_kind.search(name)))
    ]
    for name in computed:
        del found[name]
    if not computed:
        return []
    return [f"buffers that the model computes by itself are passed over: {listed(computed)}"]
