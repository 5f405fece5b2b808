"""Reads the partitions of ZeRO 1, 2 and 3, which are flat, as the tensors that they are pieces of."""

# Values from a pickle have no types until they are checked.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.source import TensorSource
from cairn.formats.base import Content
from cairn.formats.common.adamw import MOMENTS
from cairn.formats.common.tensor_views import Joined, ValueRange
from cairn.formats.deepspeed.deepspeed_files import STATES
from cairn.formats.deepspeed.deepspeed_state import (
    ALLOWED,
    Fragment,
    ModelState,
    check_adamw,
    config_in,
    content_of,
)
from cairn.formats.torch_file.pickled import held_step, steps_in
from cairn.formats.torch_file.torch_stream import SavedTensor, read_file

MASTERS = "single_partition_of_fp32_groups"
MASTERS_3 = "fp32_flat_groups"
"""The weights in full precision: of ZeRO 1 and 2, and of ZeRO 3."""
EXPERTS = ("expert_", "expp_rank_", "layer_")
"""Begin the names of files of expert and pipeline parallelism."""


@dataclass(frozen=True)
class _Rank:
    """A rank's `optim_states.pt`, checked.

    masters, moments: a flat tensor for each group. steps, settings: of each group.
    """

    path: Path
    fields: Mapping[str, Any]
    masters: Sequence[SavedTensor]
    moments: Mapping[str, Sequence[SavedTensor]]
    steps: Sequence[float]
    settings: Sequence[Mapping[str, Any]]
    stage: int
    round_robin: bool


def read_zero(folder: Path, model: Path | None) -> Content:
    """The content of a folder; see `DeepSpeed.read`.

    Args:
        model: the folder with config.json.
    """
    ranks, states = _files(folder)
    first, state = ranks[0], states[0]
    if first.stage == 3 and len(states) != len(ranks):
        raise Damaged(f"{folder}: has {len(states)} model_states.pt of {len(ranks)} ranks")
    if len(state.shapes) != len(first.masters):
        raise Damaged(f"{state.path}: lists {len(state.shapes)} groups of {len(first.masters)}")
    runs = dict((_runs_3 if first.stage == 3 else _runs_12)(ranks, state))
    weights: dict[str, TensorSource] = {}
    moments: dict[str, TensorSource] = {}
    for name, (shape, group, cuts) in runs.items():
        weights[name] = _joined(name, shape, [rank.masters for rank in ranks], cuts)
        for kind in MOMENTS:
            own = f"{name}.{kind}"
            moments[own] = _joined(own, shape, [rank.moments[kind] for rank in ranks], cuts)
        moments[f"{name}.step"] = held_step(name, first.steps[group])
    weights |= _others(states, first.stage, weights.keys())
    clip = first.fields.get("clip_grad", config_in(state.fields).get("gradient_clipping"))
    return content_of(state, weights, moments, first.settings, clip, model)


@dataclass(frozen=True)
class FlatSlice:
    """Values of a parameter in a rank's flat tensor `group`: `count` of them, from value `first` on."""

    rank: int
    group: int
    first: int
    count: int


Cuts = tuple[tuple[int, ...], int, list[FlatSlice]]
"""A parameter's shape, its group, and where its values are."""


def _joined(
    name: str, shape: tuple[int, ...], flats: Sequence[Sequence[SavedTensor]], cuts: Sequence[FlatSlice]
) -> TensorSource:
    """A parameter, or a moment of it, of the flat tensors of each rank."""
    runs = tuple(ValueRange(flats[cut.rank][cut.group], cut.first, cut.count) for cut in cuts)
    types = {run.source.spec.dtype for run in runs}
    if len(types) > 1:
        raise Damaged(f"{name} has values of several types: {', '.join(sorted(types))}")
    return Joined(runs, TensorSpec(name, min(types, default="F32"), shape))


def _files(folder: Path) -> tuple[list[_Rank], list[ModelState]]:
    """The ranks' files, in order."""
    found: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for path in sorted(folder.iterdir()):
        match = STATES.fullmatch(path.name)
        if path.name.startswith(EXPERTS) and path.name.endswith(".pt"):
            raise CheckpointError(
                f"{path}: is of expert or pipeline parallelism; only data parallelism is imported"
            )
        if path.name == "offloaded_tensors":
            raise CheckpointError(f"{path}: holds states that were offloaded to NVMe, which are not imported")
        if match is None:
            continue
        if int(match["mp"]):
            raise CheckpointError(f"{path}: is of tensor parallelism; only data parallelism is imported")
        known, number = found[match["what"]], int(match["rank"] or 0)
        if number in known:
            raise Damaged(f"{path}: there is {known[number].name}, too, of another run")
        known[number] = path
    if not found["model"] or not found["optim"]:
        if found["model"]:
            ModelState.read(next(iter(found["model"].values())))  # says why, if it was saved without ZeRO
        raise FileNotFoundError(2, "holds no model_states.pt and optim_states.pt of DeepSpeed", str(folder))
    ranks = [_rank(path) for _, path in sorted(found["optim"].items())]
    states = [ModelState.read(path) for _, path in sorted(found["model"].items())]
    for known in found.values():
        if sorted(known) != list(range(len(known))):
            raise FileNotFoundError(
                2, f"has files of ranks {', '.join(map(str, sorted(known)))}", str(folder)
            )
    _check_together(folder, ranks, states)
    return ranks, states


def _rank(path: Path) -> _Rank:
    """A rank's file, checked."""
    whole = read_file(path, ALLOWED)
    try:
        fields = whole["optimizer_state_dict"]
        third = MASTERS_3 in fields
        masters = list(fields[MASTERS_3 if third else MASTERS])
        optimizer = fields["optimizer_state_dict" if third else "base_optimizer_state"]
        if fields.get("ds_zero_partition_groups"):
            raise CheckpointError(f"{path}: has DeepSpeed's expert parallelism, which is not imported")
        if isinstance(optimizer, list):  # "elastic_checkpoint": without names, and without settings
            groups, settings = optimizer, [{} for _ in optimizer]
        else:
            groups = [optimizer["state"][number] for number in range(len(masters))]
            settings = [dict(group) for group in optimizer["param_groups"]]
        owners = [settings[0 if len(settings) != len(groups) else n] for n in range(len(groups))]
        steps: list[float] = []
        for state, own in zip(groups, owners, strict=True):
            check_adamw(path, list(state), own, config_in(whole))
            given = state.get("step", own.get("step", fields.get("base_optimizer_state_step")))
            steps.append(float(steps_in(given, path)))
        masters = [SavedTensor.of(f"part {n} of the weights", flat) for n, flat in enumerate(masters)]
        moments = {
            kind: [SavedTensor.of(f"part {n} of {kind}", state[kind]) for n, state in enumerate(groups)]
            for kind in MOMENTS
        }
        stage = fields.get("zero_stage", 1)
        count = fields["partition_count"]
        third_is_said = stage == 3
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise Damaged(f"{path}: not an optimiser's state of ZeRO ({type(error).__name__}: {error})") from None
    if third_is_said != third or type(stage) is not int or not 1 <= stage <= 3:
        raise Damaged(f"{path}: says ZeRO {stage}, and holds what another stage has")
    counts = count if isinstance(count, list) else [count]
    if len(set(counts)) != 1 or type(counts[0]) is not int:
        raise CheckpointError(f"{path}: its groups have {count} ranks; only data parallelism is imported")
    for flat in itertools.chain(masters, *moments.values()):
        if len(flat.spec.shape) != 1:
            raise Damaged(f"{path}: a partition is no flat tensor")
    zero = config_in(whole).get("zero_optimization")
    round_robin = bool(zero.get("round_robin_gradients")) if isinstance(zero, dict) else False
    return _Rank(path, fields, masters, moments, steps, settings, stage, round_robin)


def _check_together(folder: Path, ranks: Sequence[_Rank], states: Sequence[ModelState]) -> None:
    """Check that the files are all of the ranks, and of one step of one run."""
    first, state = ranks[0], states[0]
    count = first.fields["partition_count"]
    count = count[0] if isinstance(count, list) else count
    if count > len(ranks):
        raise FileNotFoundError(2, f"has optim_states.pt of {len(ranks)} of {count} ranks", str(folder))
    if count != len(ranks) or state.fields.get("dp_world_size", count) != count:
        raise Damaged(
            f"{folder}: has optim_states.pt of {len(ranks)} ranks, partitions for {count}, and was saved by "
            f"{state.fields.get('dp_world_size', count)} ranks: files of an older run are among them, or "
            "partitions are copied within groups of ranks (MiCS), which is not imported"
        )
    for rank in ranks:
        alike = (rank.stage, rank.steps, rank.fields["partition_count"], len(rank.masters))
        if alike != (first.stage, first.steps, first.fields["partition_count"], len(first.masters)):
            raise Damaged(f"{rank.path}: is of another step or run than {first.path.name}")
    for other in states:
        if (other.steps, other.shapes) != (state.steps, state.shapes):
            raise Damaged(f"{other.path}: is of another step or run than {state.path.name}")


def _runs_12(ranks: Sequence[_Rank], state: ModelState) -> Iterator[tuple[str, Cuts]]:
    """Where the parameters are, by name: in each group one after the other, cut in equal parts for the ranks.

    Raises:
        Damaged: the partitions have other sizes than the parameters need.
    """
    for group, shapes in enumerate(state.shapes):
        starts, end = _starts(ranks[0], group, shapes)
        part = _part(ranks, group, end)
        for name, shape in shapes.items():
            begin, stop = starts[name], starts[name] + math.prod(shape)
            cuts: list[FlatSlice] = []
            for rank in range(begin // part, -(-stop // part)):
                low, high = max(begin, rank * part), min(stop, (rank + 1) * part)
                cuts.append(FlatSlice(rank, group, low - rank * part, high - low))
            _check_mapping(ranks, group, name, cuts)
            yield name, (shape, group, cuts)


def _starts(first: _Rank, group: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, int], int]:
    """The first value of each parameter in its group, and the end of the last one."""
    paddings = first.fields.get("param_alignment_paddings")
    known = paddings[group] if isinstance(paddings, list) and group < len(paddings) else [0] * len(shapes)
    if len(known) != len(shapes) or any(type(n) is not int or n < 0 for n in known):
        raise Damaged(f"{first.path}: param_alignment_paddings is not that of {len(shapes)} parameters")
    starts: dict[str, int] = {}
    end = 0
    for (name, shape), padding in zip(shapes.items(), known, strict=True):
        starts[name] = end
        end += math.prod(shape) + padding
    return starts, end


def _part(ranks: Sequence[_Rank], group: int, end: int) -> int:
    """The size of each rank's partition of a group that has `end` values before its padding."""
    sizes: set[int] = set()
    for number, rank in enumerate(ranks):
        try:
            padding = rank.fields["group_paddings"][group]
        except (KeyError, IndexError, TypeError) as error:
            raise Damaged(f"{rank.path}: has no group_paddings of group {group} ({error!r})") from None
        stored = rank.masters[group].size
        whole = stored + padding if "zero_stage" in rank.fields else stored  # BF16_Optimizer keeps padding
        sizes.add(whole)
        real = min(max(end - number * whole, 0), whole)
        if padding != whole - real or (number == len(ranks) - 1 and (number + 1) * whole < end):
            raise Damaged(
                f"{rank.path}: group {group} has {whole} values, {padding} of them padding, and its "
                f"parameters have {end} on {len(ranks)} ranks: something is missing or left over"
            )
        for kind in MOMENTS:
            if (count := rank.moments[kind][group].size) not in (whole, real):
                raise Damaged(
                    f"{rank.path}: {kind} of group {group} has {count} values, its weights {stored}"
                )
    if len(sizes) != 1:
        raise Damaged(f"{ranks[0].path.parent}: the ranks hold parts of group {group} of different sizes")
    return max(sizes.pop(), 1)


def _check_mapping(ranks: Sequence[_Rank], group: int, name: str, cuts: Sequence[FlatSlice]) -> None:
    """Compare with where each rank says that its part of a parameter is, if it says so.

    With `round_robin_gradients`, DeepSpeed lists other places than the parameters have (0.19.8).
    """
    if ranks[0].round_robin:
        return
    where = {cut.rank: (cut.first, cut.count) for cut in cuts}
    for number, rank in enumerate(ranks):
        mappings = rank.fields.get("param_slice_mappings")
        if not isinstance(mappings, list):
            continue
        address = mappings[group].get(name) if group < len(mappings) else None
        known = address.fields if isinstance(address, Fragment) else {}
        said = (known.get("start"), known.get("numel")) if known else None
        if said != where.get(number):
            raise Damaged(f"{rank.path}: has {name} at {said}, and its order says {where.get(number)}")


def _runs_3(ranks: Sequence[_Rank], state: ModelState) -> Iterator[tuple[str, Cuts]]:
    """Where the parameters are, by name: each is cut in equal parts, and a rank has its parts in order."""
    for group, shapes in enumerate(state.shapes):
        end = 0
        for name, shape in shapes.items():
            count = math.prod(shape)
            part = -(-count // len(ranks))
            cuts: list[FlatSlice] = []
            for rank in range(len(ranks)):
                if (real := min(part, count - rank * part)) > 0:
                    cuts.append(FlatSlice(rank, group, end, real))
            end += part
            yield name, (shape, group, cuts)
        for rank in ranks:
            flats = [rank.masters[group], *(rank.moments[kind][group] for kind in MOMENTS)]
            if any(flat.size != end for flat in flats):
                counts = ", ".join(str(flat.size) for flat in flats)
                raise Damaged(
                    f"{rank.path}: group {group} has {counts} values, and its parameters have {end} on each "
                    f"of {len(ranks)} ranks"
                )


def _others(states: Sequence[ModelState], stage: int, trained: Collection[str]) -> dict[str, TensorSource]:
    """The model's tensors that the optimiser does not hold: buffers, and parameters that are not trained."""
    state = states[0]
    frozen = state.frozen()
    others: dict[str, TensorSource] = {}
    for name, tensor in state.module.items():
        whole = name in state.buffers or (stage < 3 and name not in frozen)
        if whole and name not in trained and name not in state.shared:
            others[name] = tensor
    for name, shape in frozen.items():
        parts = [part for held in states if (part := held.fragments().get(name)) is not None]
        left = count = math.prod(shape)
        if len(parts) != len(states) or not 0 <= sum(part.size for part in parts) - count < len(parts):
            raise Damaged(f"{state.path}: {name}, which is not trained, has not all of its values")
        cuts: list[FlatSlice] = []
        for number, part in enumerate(parts):
            cuts.append(FlatSlice(0, number, 0, min(part.size, left)))
            left -= cuts[-1].count
        others[name] = _joined(name, shape, [parts], [cut for cut in cuts if cut.count])
    return others
