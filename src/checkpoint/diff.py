"""The differences between two checkpoints: configuration, versions, metrics, and every weight."""

# torch is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cairn.checkpoint.formats import FORMATS
from cairn.checkpoint.manifest import load_manifest
from cairn.checkpoint.step import MODEL, OrchestratorRecord, StepFolder, TrainerRecord


def compare(a: Path, b: Path) -> dict[str, Any]:
    """The content of `ckpt diff --json` for two step folders.

    Raises:
        CheckpointError: one of them is not a checkpoint.
    """
    one, two = load_manifest(a), load_manifest(b)
    return {
        "a": {"folder": str(a), "step": one.step, "run_id": one.run_id, "branch": one.branch},
        "b": {"folder": str(b), "step": two.step, "run_id": two.run_id, "branch": two.branch},
        "config": _changes(_config_of(a), _config_of(b)),
        "versions": _changes(one.versions, two.versions),
        "metrics": _changes(one.metrics, two.metrics),
        **_tensor_changes(a, b),
    }


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


def _tensor_changes(a: Path, b: Path) -> dict[str, Any]:
    """For each weight in both: the largest change of a value, and the change's norm over the weight's."""
    from cairn.checkpoint.tensors import read_tensor

    in_a, in_b = (FORMATS["hf"].read(StepFolder(step).model).tensors[MODEL] for step in (a, b))
    rows: list[dict[str, Any]] = []
    other_shape: list[str] = []
    for name in sorted(in_a.keys() & in_b.keys()):
        if in_a[name].spec.shape != in_b[name].spec.shape:
            other_shape.append(name)
            continue
        before, after = read_tensor(in_a[name]).double(), read_tensor(in_b[name]).double()
        change, norm = after - before, before.norm().item()
        relative = change.norm().item() / norm if norm else change.norm().item()
        rows.append(
            {
                "name": name,
                "max_change": change.abs().max().item() if change.numel() else 0.0,
                "relative_change": relative,
            }
        )
    return {
        "only_in_a": sorted(in_a.keys() - in_b.keys()),
        "only_in_b": sorted(in_b.keys() - in_a.keys()),
        "other_shape": other_shape,
        "tensors": rows,
    }
