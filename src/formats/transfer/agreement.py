"""Brings a checkpoint's weights and its config.json to agree where they don't, and says how.

Nothing that could be checked is assumed: a copy of a tied weight is compared with what it is a copy of, data
types tell whether weights are quantised, and names without a place in the model are left out only if they are
buffers that every model of the kind computes anew.
"""

import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL, OPTIMIZER
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.model.adapters import adapter_parts
from cairn.model.described import (
    FILE_NAME,
    LEADING,
    about_model,
    as_file,
    is_quantized,
    is_wrapped,
    quantization_of,
    refuse_quantized,
    unwrapped,
    with_changes,
    without_quantization,
)
from cairn.model.hub_layout import Layout, hub_layout, is_copy, tied_apart
from cairn.model.untrusted_config import load_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


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
    """Give weights other names, and their state in the optimiser with them."""
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


# The base of an adapter that holds more than products: other rows of the vocabulary, or its own head.


# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


@dataclass(frozen=True)
class FittingBase:
    """The weights and the layout of a base, as an adapter needs them.

    weights: by the names that the base's files give them; those that the adapter holds whole may have the
    shape of the base. changes: entries of config.json that the merged model has instead of the base's.
    """

    weights: Mapping[str, TensorSource]
    layout: Layout
    changes: dict[str, Any] = field(default_factory=dict[str, Any])
    said: tuple[str, ...] = ()


def base_for(adapter: Path, weights: Mapping[str, TensorSource], base: Path) -> FittingBase:
    """The base in the folder `base`, whose files hold `weights`, for the adapter in the folder `adapter`.

    Embeddings to which the adapter has added rows, which PEFT then saves whole, widen the base. A head that
    has a part in the adapter, and in the base is tied to the embedding, becomes one of its own: PEFT trains a
    copy of it.

    Raises:
        CheckpointError: the adapter does not hold everything that gets more rows.
        Damaged: a file is invalid.
    """
    found = agree({MODEL: weights}, base, base)
    parts = adapter_parts(adapter)
    changes: dict[str, Any] = {}
    said = list(found.said)
    own = [
        name
        for name in found.layout.tied_in_memory
        if _is_part(name, parts) and not is_copy(name, parts, found.layout)
    ]
    if own:
        changes["tie_word_embeddings"] = False
        said.append(
            f"config.json: tie_word_embeddings is false now: the adapter has a part for {own[0]}, which the "
            f"base ties to {found.layout.tied_in_memory[own[0]]}"
        )
    rows = _other_rows(found, parts, adapter)
    if rows is not None:
        changes["vocab_size"] = rows
        before = found.config.get_text_config().vocab_size
        said.append(f"config.json: vocab_size is {rows} now, as the adapter has it, and {before} in the base")
    if not changes:
        return FittingBase(found.tensors[MODEL], found.layout, said=tuple(said))
    other = agree({MODEL: weights}, base, base, changes)
    named = dict(other.tensors[MODEL])
    there = {place: named[name] for name, place in found.layout.find(named.keys()).items() if name in named}
    by_name = {place.name: source for place, source in there.items()}
    for name, place in other.layout.places.items():
        of = found.layout.tied_in_memory.get(place.name)
        if of in by_name and name not in named:
            named[name] = by_name[of]
    if narrow := sorted(
        name
        for name, shape in other.layout.shapes.items()
        if name in found.layout.shapes and shape != found.layout.shapes[name] and name not in parts
    ):
        raise CheckpointError(
            f"{adapter}: the adapter was trained with {rows} rows of the vocabulary, and does not hold those "
            f"of {listed(narrow)}; resize the base in transformers (model.resize_token_embeddings({rows})) "
            "and save it, or merge the adapter in PEFT (merge_and_unload)"
        )
    return FittingBase(named, other.layout, changes, tuple(said))


def _is_part(name: str, parts: Mapping[str, TensorSource]) -> bool:
    """Whether an adapter has a weight whole, or matrices that are added to it."""
    return name in parts or f"{name.removesuffix('.weight')}.lora_A.weight" in parts


def _other_rows(found: Agreed, parts: Mapping[str, TensorSource], adapter: Path) -> int | None:
    """How many rows of the vocabulary the adapter holds, if those are not as many as the base has."""
    size = getattr(found.config.get_text_config(), "vocab_size", None)
    tied, shapes = found.layout.tied_in_memory, found.layout.shapes
    rows: dict[str, int] = {}
    for name, source in parts.items():
        shape = shapes.get(name) or shapes.get(tied.get(name, ""))
        mine = source.spec.shape
        if shape and mine and mine != shape and shape[0] == size and mine[1:] == shape[1:]:
            rows[name] = mine[0]
    if len(set(rows.values())) > 1:
        raise CheckpointError(f"{adapter}: the adapter's embeddings have different numbers of rows: {rows}")
    return next(iter(rows.values()), None)
