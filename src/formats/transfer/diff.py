"""The differences between two checkpoints, of Cairn or of another program: settings, and every tensor."""

# torch is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.checkpoint.manifest import FILE_NAME, Manifest, load_manifest
from cairn.checkpoint.step_folder import (
    ADAPTER,
    CRITIC,
    CRITIC_OPTIMIZER,
    MODEL,
    OPTIMIZER,
    OrchestratorRecord,
    StepFolder,
    TrainerRecord,
)
from cairn.formats import FORMATS, Content, TensorSource, format_of, read_foreign
from cairn.run.errors import UsageError
from cairn.run.output import Stage, no_progress

if TYPE_CHECKING:
    from cairn.model.hub_layout import Layout


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints. manifest: None if it is another program's. content: its tensors."""

    path: Path
    name: str
    content: Content
    manifest: Manifest | None = None


OF_CRITIC = {
    "critic": (CRITIC, "the critic's weights"),
    "critic_optimizer": (CRITIC_OPTIMIZER, "the state of the critic's optimiser"),
}
"""What both sides may have of a critic: the stem, and how it is called, by the key in the report."""


def compare(a: Path, b: Path, stage: Stage = no_progress) -> dict[str, Any]:
    """The content of `ckpt diff --json` for two checkpoints: step folders, or whatever a format reads.

    Tensors are read in pieces. They are compared by the hub's names if one of the two has a config.json that
    says what these are, and otherwise by the names that they have.

    Raises:
        UsageError: one of them has no known format.
        CheckpointError: one of them is invalid.
    """
    sides = [_side(path) for path in (a, b)]
    layout = _layout_of(*sides)
    named = [_by_stem(side.content, layout) for side in sides]
    report: dict[str, Any] = {letter: _about(side) for letter, side in zip(("a", "b"), sides, strict=True)}
    one, two = (side.manifest for side in sides)
    if one and two:
        report["config"] = _changes(_config_of(a), _config_of(b))
        report["versions"] = _changes(one.versions, two.versions)
        report["metrics"] = _changes(one.metrics, two.metrics)
    else:
        report["config"] = _changes(*(side.content.settings for side in sides))
        report["versions"] = report["metrics"] = {}
    report |= _tensor_changes(named[0][MODEL], named[1][MODEL], stage, "comparing weights")
    states = [stems.get(OPTIMIZER) for stems in named]
    report["optimizer"] = None
    if states[0] and states[1]:
        report["optimizer"] = _tensor_changes(states[0], states[1], stage, "comparing the optimiser's state")
    critics = [_critic(side) for side in sides]
    for name, (stem, what) in OF_CRITIC.items():
        both = [critic.get(stem, {}) for critic in critics]
        report[name] = None
        if all(both):
            report[name] = _tensor_changes(both[0], both[1], stage, f"comparing {what}")
    return report


def _critic(side: Side) -> Mapping[str, Mapping[str, TensorSource]]:
    """The tensors of a critic by stem, under the names that a step of Cairn has."""
    if side.manifest:
        return {stem: StepFolder(side.path).tensors(stem) for stem, _ in OF_CRITIC.values()}
    if side.content.critic is None:
        return {}
    from cairn.formats.common.value_head import critic_of  # imports torch

    return critic_of(side.content, side.content.critic, side.path)[0]


def _side(path: Path) -> Side:
    """What is in a folder or file."""
    if (path / FILE_NAME).exists():
        from cairn.formats.transfer.export_step import content_of_step  # imports torch

        manifest, content = load_manifest(path), content_of_step(path)
        if ADAPTER in content.tensors:  # two adapters' states can be compared, if not taken over
            state = StepFolder(path).tensors(OPTIMIZER)
            content = replace(content, tensors={**content.tensors, **({OPTIMIZER: state} if state else {})})
        return Side(path, "cairn", content, manifest)
    name = format_of(path) if path.exists() else None
    if name is None:
        raise UsageError(f"{path}: is neither a step of Cairn nor of one of the formats {', '.join(FORMATS)}")
    try:
        return Side(path, name, read_foreign(path, name))
    except FileNotFoundError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None


def _about(side: Side) -> dict[str, Any]:
    about: dict[str, Any] = {"folder": str(side.path), "format": side.name, "step": side.content.step}
    if side.manifest:
        about |= {"step": side.manifest.step, "run_id": side.manifest.run_id, "branch": side.manifest.branch}
    return about


def _layout_of(*sides: Side) -> "Layout | None":
    """The names of the model's tensors, by the config.json of the first side that has one.

    Nothing is needed where both sides are steps of Cairn, which have the hub's names.
    """
    folders = [side.content.model for side in sides]
    config = next((folder for folder in folders if folder and (folder / "config.json").is_file()), None)
    if config is None or all(side.manifest for side in sides):
        return None
    from cairn.model.hub_layout import hub_layout
    from cairn.model.untrusted_config import load_config

    return hub_layout(load_config(config))


def _by_stem(content: Content, layout: "Layout | None") -> dict[str, Mapping[str, TensorSource]]:
    """The tensors by stem and the names by which they are compared."""
    if layout is None:
        return dict(content.tensors)
    found: dict[str, Mapping[str, TensorSource]] = {MODEL: _hub_names(content.tensors[MODEL], layout)}
    if state := content.tensors.get(OPTIMIZER):
        found[OPTIMIZER] = _names_in_memory(state, layout)
    return found


def _hub_names(weights: Mapping[str, TensorSource], layout: "Layout") -> dict[str, TensorSource]:
    """Weights by the hub's names, without copies of tied ones; what has no place keeps its name."""
    from cairn.checkpoint.tensors.layout import TensorSpec
    from cairn.formats.common.tensor_views import TensorSection
    from cairn.model.hub_layout import tied_apart

    places = {name: place for name, place in layout.find(weights.keys()).items() if name in weights}
    hub = {place: name for name, place in layout.places.items()}
    copies = tied_apart(weights, layout)[0]
    found: dict[str, TensorSource] = {}
    for name, source in weights.items():
        place = places.get(name)
        if place in hub:
            found[hub[place]] = source
        elif place is not None and source.spec.shape == place.shape:
            for part, own in hub.items():
                if part.name == place.name:
                    found[own] = TensorSection(
                        source, part.first, TensorSpec(own, source.spec.dtype, part.shape)
                    )
        elif name not in copies:
            found[name] = source
    return found


def _names_in_memory(state: Mapping[str, TensorSource], layout: "Layout") -> dict[str, TensorSource]:
    """The optimiser's state by transformers' names, where it is of whole tensors of these."""
    owners = {name: name.rpartition(".")[0] for name in state}
    places = layout.find(set(owners.values()))
    found: dict[str, TensorSource] = {}
    for name, source in state.items():
        place = places.get(owners[name])
        if place is not None and place.shape == layout.shapes[place.name]:
            name = f"{place.name}{name[len(owners[name]) :]}"
        found[name] = source
    return found


def _config_of(folder: Path) -> dict[str, object]:
    flat: dict[str, object] = {}

    def walk(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, f"{key}.{name}" if key else name)
        else:
            flat[key] = value

    trainer = StepFolder(folder).trainer_state() or TrainerRecord()
    orchestrator = StepFolder(folder).orchestrator_state() or OrchestratorRecord()
    walk(trainer.recipe or {"settings": trainer.config or {}}, "")
    walk({"orchestrator": orchestrator.recipe or {}}, "")
    return {key.replace("settings.", ""): value for key, value in flat.items()}


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def _tensor_changes(
    a: Mapping[str, TensorSource], b: Mapping[str, TensorSource], stage: Stage, doing: str
) -> dict[str, Any]:
    """What the tensors of only one side are, and for each of both, how much its values differ."""
    both = sorted(a.keys() & b.keys())
    same = [name for name in both if a[name].spec.shape == b[name].spec.shape]
    progress = stage(doing, sum(a[name].spec.nbytes + b[name].spec.nbytes for name in same))
    rows: list[dict[str, Any]] = []
    for name in same:
        rows.append({"name": name, **_change(a[name], b[name])})
        progress(a[name].spec.nbytes + b[name].spec.nbytes)
    return {
        "only_in_a": sorted(a.keys() - b.keys()),
        "only_in_b": sorted(b.keys() - a.keys()),
        "other_shape": [name for name in both if a[name].spec.shape != b[name].spec.shape],
        "other_dtype": [name for name in same if a[name].spec.dtype != b[name].spec.dtype],
        "tensors": rows,
    }


def _change(a: TensorSource, b: TensorSource) -> dict[str, Any]:
    """How the values of two tensors of the same shape differ.

    max_change: the largest change of a value. relative_change: the norm of the change over that of the first
    tensor. changed: the number of values that differ. not_finite: how many of these are infinite or no
    numbers on one side; they count in nothing else.
    """
    import torch

    from cairn.checkpoint.tensors.sharded_files import pieces

    count = torch.Size(a.spec.shape).numel()
    largest = change = norm = 0.0
    changed = not_finite = 0
    for _, (x, y) in pieces(a, b):
        before, after = x.double(), y.double()
        norm += before.nan_to_num(0.0, 0.0, 0.0).square().sum().item()
        differs = (before != after) & ~(before.isnan() & after.isnan())
        moved = (after - before)[differs]
        finite = moved[moved.isfinite()]
        changed += len(moved)
        not_finite += len(moved) - len(finite)
        if len(finite):
            largest = max(largest, finite.abs().max().item())
            change += finite.square().sum().item()
    relative = (change / norm) ** 0.5 if norm else change**0.5
    return {
        "dtypes": [a.spec.dtype, b.spec.dtype],
        "values": count,
        "changed": changed,
        "not_finite": not_finite,
        "max_change": largest,
        "relative_change": relative,
    }
