"""The base of an adapter that holds more than products: other rows of the vocabulary, or its own head."""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.formats.transfer.agreement import Agreed, agree
from cairn.model.adapters import adapter_parts
from cairn.model.hub_layout import Layout
from cairn.model.tied_weights import is_copy


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
    """How many rows of the vocabulary the adapter holds, if those are not as many as the base has.

    Raises:
        CheckpointError: its embeddings have different numbers of them.
    """
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
