"""The checkpoint-N folders of transformers' Trainer (and TRL): weights, AdamW's state, and step."""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL, OPTIMIZER
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.formats.base import Content, Verification, WriteOptions
from cairn.formats.common.adamw import settings_of
from cairn.formats.common.roundtrip import KeptValues
from cairn.formats.huggingface.hf_trainer_groups import (
    KINDS,
    OPTIMIZER_FILE,
    SCHEDULER_FILE,
    STATE,
    decaying_otherwise,
    groups_of,
    state_by_name,
)
from cairn.formats.huggingface.huggingface import weights_in
from cairn.run.files import read_json

LEFT_OUT = {
    "rng_state": "Cairn seeds every draw anew, from the run's seed and the step",
    "training_args.bin": "it is a pickle of classes, which is never loaded",
    "scaler.pt": "Cairn needs no loss scaling",
}


@dataclass(frozen=True)
class HFTrainerState:
    """What is read of trainer_state.json."""

    global_step: int
    max_steps: int = 0
    epoch: float | None = None
    train_batch_size: int | None = None
    num_input_tokens_seen: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class HuggingFaceTrainer:
    """Trainer's folder on one process, or of data-parallel ones; not that of FSDP or DeepSpeed."""

    stems = (MODEL, OPTIMIZER)

    def detect(self, source: Path) -> bool:
        """Whether `source` is a folder with a trainer_state.json."""
        return (source / STATE).exists()

    def read(self, source: Path, model: Path | None = None) -> Content:
        """Weights, AdamW's state by name, the step, and the settings that the optimiser's groups have.

        Raises:
            FileNotFoundError: a file is missing.
            Damaged: a file is invalid, or would execute code.
            CheckpointError: the optimiser is not AdamW, or its state does not fit the model.
        """
        progress = read_json(source / STATE, HFTrainerState)
        if progress is None:
            raise FileNotFoundError(2, "no such file", str(source / STATE))
        state, settings, notes = _read_optimizer(source, model or source)
        schedule, said = _read_schedule(source, progress)
        passed_over = [
            f"{path.name}: {why}"
            for path in sorted(source.iterdir())
            for name, why in LEFT_OUT.items()
            if path.name.startswith(name)
        ]
        return Content(
            {MODEL: weights_in(source), OPTIMIZER: state},
            model=model or source,
            step=progress.global_step,
            tokens=progress.num_input_tokens_seen or None,
            optimizer="AdamW",
            settings=settings | schedule,
            left_out=(*passed_over, *notes, *said, _position(source, progress)),
        )

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        """Write what `Trainer.train(resume_from_checkpoint=folder)` goes on from.

        Raises:
            CheckpointError: the step lacks state or settings that Trainer needs, or Trainer's AdamW would
                decay other weights.
            OSError: a file can't be written.
        """
        from cairn.formats.huggingface.hf_trainer_writer import write  # imports torch

        kept = KeptValues(content, options.dtype)
        write(kept.content, folder, options)
        return kept.read_back(self, folder)


def _read_optimizer(
    source: Path, model: Path
) -> tuple[dict[str, TensorSource], dict[str, Any], tuple[str, ...]]:
    """AdamW's state by transformers' names, the settings in its groups, and what is left out of these.

    Args:
        model: has the model's config.json.
    """
    from cairn.formats.torch_file.pickled import load_pickled

    path = source / OPTIMIZER_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{source}: has no {OPTIMIZER_FILE}; its weights alone are imported with --format hf"
        )
    content = load_pickled(path)
    try:
        groups, states = content["param_groups"], content["state"]
        numbers = [number for group in groups for number in group["params"]]
        known = set(numbers)
        settings = _settings(groups, path)
        kinds = {kind for state in states.values() for kind in state.keys()}  # noqa: SIM118 # which must be a dictionary
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{path}: holds no state of an optimiser ({error!r})") from None
    if kinds != KINDS:
        raise CheckpointError(f"{path}: has {', '.join(sorted(map(str, kinds)))}, not the state of AdamW")
    decaying, others = groups_of(model)
    sizes = [len(group["params"]) for group in groups]
    if sizes != [len(decaying), len(others)]:
        raise CheckpointError(
            f"{path}: has groups of {sizes} weights; Trainer makes one with weight decay, here of "
            f"{len(decaying)}, and one of the other {len(others)}; all weights must have been trained"
        )
    order = decaying | others
    if known != set(states):
        raise CheckpointError(
            f"{path}: has the state of {len(states)} of {len(numbers)} weights; all must have been trained"
        )
    notes = ()
    if settings.get("optimizer.weight_decay") and (wrong := decaying_otherwise(decaying, others)):
        notes = (f"the weight decay of {listed(wrong)}, or that they have none: Cairn decays all matrices",)

    def misfit(number: Any, found: list[int], name: str, shape: list[int]) -> str:
        return (
            f"{path}: the state of weight {number} has shape {found}, and {name}, which should be that, has "
            f"{shape}"
        )

    return state_by_name(order, numbers, states, path, misfit), settings, notes


def _settings(groups: Collection[Mapping[str, Any]], path: Path) -> dict[str, Any]:
    """The settings that groups of AdamW have; the rate is that at the schedule's top."""
    found = settings_of(groups, path)
    return {
        name: [float(each) for each in value] if isinstance(value, (list, tuple)) else float(value)
        for name, value in found.items()
    }


def _read_schedule(source: Path, progress: HFTrainerState) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings of the schedule, and what has to be said of it.

    Trainer does not store which schedule it was, but the rates that it gave.
    """
    from cairn.formats.huggingface.hf_schedule import schedule_of  # imports NumPy
    from cairn.formats.torch_file.pickled import load_pickled

    path = source / SCHEDULER_FILE
    try:
        content = load_pickled(path)
        peak, upcoming = float(content["base_lrs"][0]), float(content["_last_lr"][0])
    except FileNotFoundError:
        return {}, ()
    except (Damaged, LookupError, TypeError, ValueError):
        return {}, (f"{path.name}: it holds no rates that can be read; give the run the same schedule",)
    if peak <= 0:
        return {}, (f"{path.name}: its peak is {peak}; give the run the same schedule",)
    logged = [
        {**entry, "learning_rate": entry["learning_rate"] / peak}
        for entry in progress.log_history
        if isinstance(entry.get("learning_rate"), (int, float))
    ]
    found = schedule_of(logged, upcoming / peak, progress.global_step, progress.max_steps)
    if found:
        return found, ()
    return {}, (
        f"{path.name}: which schedule it is of can't be told from its rates; the next one was {upcoming:g}, "
        f"with a peak of {peak:g} and {progress.max_steps} steps in all: give the run the same schedule",
    )


def _position(source: Path, progress: HFTrainerState) -> str:
    """What is known of the position in the data."""
    ranks = len(list(source.glob("rng_state*.pth")))
    known = [f"step {progress.global_step}"]
    known += [] if progress.epoch is None else [f"epoch {progress.epoch:g}"]
    if progress.train_batch_size:
        known += [
            f"{progress.train_batch_size} records at a time" + (f" on {ranks} ranks" if ranks > 1 else "")
        ]
    return f"the position in the data ({', '.join(known)}): Cairn begins the data anew, in its own order"
