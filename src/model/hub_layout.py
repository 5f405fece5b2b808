"""The tensor names in model files: those of the Hugging Face hub, which transformers and vLLM both read.

transformers 5 holds some models in another form in memory than in files: the experts of a layer are one
tensor, and some modules are renamed. Its own conversion, run on tensors of the meta device, tells which part
of which tensor in memory belongs to each name in the files. The part is always contiguous, so each rank
writes and reads its own ranges of files without a gather.
"""

import re
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from cairn.checkpoint.tensors.placement import Place
from cairn.checkpoint.tensors.sharded_files import pieces
from cairn.checkpoint.tensors.source import TensorSource
from cairn.model.untrusted_config import making_model
from cairn.run.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


class LayoutUnknown(UsageError):
    """The model's tensors can't be written under the names that the hub uses."""


@dataclass(frozen=True)
class Layout:
    """The tensors of a model's folder.

    places: by the name in files, in the order in which they are written. tied: names in files that are not
    written because they are tied to another name; some folders hold a copy. tied_in_memory: the same by
    transformers' names. shapes: of the tensors in memory, by transformers' name. buffers: those of them that
    are not trained; they keep their data type when weights are converted.
    """

    places: dict[str, Place]
    tied: dict[str, str]
    tied_in_memory: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    buffers: frozenset[str]
    _renamings: list[Any]
    _prefix: str

    def find(self, stored: Collection[str]) -> dict[str, Place]:
        """The places of the tensors in a folder that holds the names `stored`, by these names.

        The names may be the hub's, transformers' own, or older ones that transformers renames on loading;
        other names are left out. Tensors that are missing in the folder are listed under the hub's names.
        """
        own = {name: Place(name, 0, shape) for name, shape in self.shapes.items()}
        for known in (self.places, own):
            if known.keys() <= set(stored):
                return dict(known)
        renamed = {self._rename(name): place for name, place in self.places.items()} | own
        found = {}
        for name in stored:
            short = self._rename(name)
            bare = re.sub(f"^{re.escape(self._prefix)}\\.", "", short)
            for guess in (short, f"{self._prefix}.{short}", bare):
                if guess in renamed:
                    found[name] = renamed[guess]
                    break
        there = set(found.values())
        whole = {place.name for place in there if place == own.get(place.name)}
        missing = {
            name: place
            for name, place in self.places.items()
            if place not in there and place.name not in whole
        }
        return found | missing

    def _rename(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name


def hub_layout(config: "PreTrainedConfig") -> Layout:
    """The names and shapes of the tensors in a folder of the model that `config` describes.

    The trainer writes these names into `model/` and into the folder of a policy. Readers of such folders find
    the exact names in `places`, and the shapes in `Place.shape`; every tensor may have any floating-point
    type. The model is built on the meta device, which takes a moment: keep the result.

    Raises:
        Damaged: transformers can't make a model of the configuration.
        LayoutUnknown: transformers converts a tensor in a way that can't be written in parts.
    """
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

    with making_model(config), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
    mine = tensors_in_memory(model)
    blanks = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    owners = {_storage(blank): name for name, blank in blanks.items()}
    with _Views():
        converted = revert_weight_conversion(model, dict(blanks))
    places: dict[str, Place] = {}
    for name, view in converted.items():
        owner = owners.get(_storage(view))
        if owner is None or not view.is_contiguous():
            raise LayoutUnknown(
                f"{type(model).__name__} can't be trained: its files hold {name}, which transformers makes "
                "of its own tensors by more than cutting and renaming, and Cairn writes and reads files in "
                "parts"
            )
        places[name] = Place(owner, int(view.storage_offset()), tuple(view.shape))
    order = {name: number for number, name in enumerate(blanks)}
    places = dict(sorted(places.items(), key=lambda item: (order[item[1].name], item[1].first)))
    hub_names = {place.name: name for name, place in places.items()}
    tied_in_memory = {name: of for name, of in model.all_tied_weights_keys.items() if name not in mine}
    tied = {hub_names[name]: hub_names[of] for name, of in tied_in_memory.items()}
    places = {name: place for name, place in places.items() if place.name in mine}
    _check_covered(places.values(), mine)
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    shapes = {name: tuple(tensor.shape) for name, tensor in mine.items()}
    buffers = frozenset(name for name, _ in model.named_buffers())
    return Layout(places, tied, tied_in_memory, shapes, buffers, renamings, model.base_model_prefix)


def tensors_in_memory(model: "PreTrainedModel") -> dict[str, torch.Tensor]:
    """The model's state by transformers' names, including buffers; tied tensors are listed once."""
    once = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in model.state_dict().items() if name in once}


def layout_of(model: "PreTrainedModel") -> Layout:
    """`hub_layout` of a model, computed once and cached as long as the model lives."""
    if model not in _LAYOUTS:
        _LAYOUTS[model] = hub_layout(model.config)
    return _LAYOUTS[model]


_LAYOUTS: "weakref.WeakKeyDictionary[torch.nn.Module, Layout]" = weakref.WeakKeyDictionary()


def _storage(tensor: torch.Tensor) -> int:
    """Identifies the memory that a tensor views; on the meta device it has no address."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage] # no public identity


class _Views(TorchFunctionMode):
    """Makes `contiguous` a no-op, so that converted tensors stay views of the originals."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _check_covered(places: Iterable[Place], tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that the files hold every value exactly once."""
    ends = dict.fromkeys(tensors, 0)
    for place in places:
        if ends[place.name] != place.first:
            raise LayoutUnknown(f"the files would not hold every value of {place.name} once")
        ends[place.name] += torch.Size(place.shape).numel()
    for name, tensor in tensors.items():
        if ends[name] != tensor.numel():
            raise LayoutUnknown(f"the files would not hold every value of {name}")


# Tied weights of which files hold copies: whether these are copies is compared, and not assumed.


def tied_apart(found: Mapping[str, TensorSource], layout: Layout) -> tuple[list[str], dict[str, str]]:
    """The tensors that the model ties to others which are there, too.

    Returns:
        The names of those that are copies of these others, and of those that are not, with the others'.

    Raises:
        Damaged: a tensor can't be read.
    """
    owners = {place.name: name for name, place in layout.find(found.keys()).items() if name in found}
    owners |= {name: name for name in layout.places if name in found}
    copies: list[str] = []
    apart: dict[str, str] = {}
    for name, of in (layout.tied_in_memory | layout.tied).items():
        owner = owners.get(of)
        if name not in found or owner is None or name == owner:
            continue
        if same_values(found[name], found[owner]):
            copies.append(name)
        else:
            apart[name] = owner
    return copies, apart


def is_copy(name: str, parts: Mapping[str, TensorSource], layout: Layout) -> bool:
    """Whether a tensor, by transformers' name, is a copy of one in `parts` to which the model ties it."""
    of = layout.tied_in_memory.get(name)
    return name in parts and of is not None and of in parts and same_values(parts[name], parts[of])


def same_values(one: TensorSource, other: TensorSource) -> bool:
    """Whether two tensors have the same shape and values, whatever their data types.

    Raises:
        Damaged: one can't be read.
    """
    if one.spec.shape != other.spec.shape:
        return False
    for _, (a, b) in pieces(one, other):
        if not torch.equal(a, b) if a.dtype == b.dtype else not torch.equal(a.double(), b.double()):
            return False
    return True
