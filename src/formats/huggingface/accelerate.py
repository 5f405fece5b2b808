"""Folders of accelerate's `Accelerator.save_state`: weights without config.json, and AdamW's state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL, OPTIMIZER
from cairn.checkpoint.tensors.source import TensorSource
from cairn.formats.base import Content
from cairn.formats.common.adamw import STATE, settings_of
from cairn.formats.huggingface.hf_trainer_groups import groups_of, state_by_name, weights_in_order
from cairn.formats.huggingface.huggingface import weights_in
from cairn.run.errors import UsageError

OPTIMIZER_FILE = "optimizer.bin"
LEFT_OUT = {
    "scheduler": "which schedule it is of is not in it; give the run the same one",
    "random_states": "Cairn seeds every draw anew, from the run's seed and the step",
    "sampler": "Cairn begins the data anew, in its own order",
    "scaler": "Cairn needs no loss scaling",
    "custom_checkpoint": "it is an object of the program's own",
}
"""Files of such a folder that are passed over, by how their names begin."""


class Accelerate:
    """A folder of one model that was trained on one process, or with DistributedDataParallel."""

    def detect(self, source: Path) -> bool:
        if not source.is_dir() or (source / "config.json").exists():
            return False
        weights = (*source.glob("*.safetensors"), *source.glob("pytorch_model*.bin"))
        return bool(weights) and (
            any(source.glob("random_states_*.pkl")) or (source / OPTIMIZER_FILE).is_file()
        )

    def read(self, source: Path, model: Path | None = None) -> Content:
        """The weights, and AdamW's state if it can be told which weight each part of it is of.

        The optimiser numbers weights in the order in which it was given them. One group that has as many as
        the model, with the shapes that the model's have one after the other, was given `model.parameters()`;
        two are taken for Trainer's, with weight decay and without.

        Raises:
            FileNotFoundError: a file is missing.
            Damaged: a file is invalid, or would execute code.
            UsageError: no folder with config.json is given.
        """
        if model is None:
            raise UsageError(
                f"{source}: is what accelerate's save_state writes, without config.json and tokenizer; give "
                "the folder of the model that was trained (ckpt: --model FOLDER; runs: --model.config FOLDER)"
            )
        left_out = [
            f"{path.name}: {why}"
            for path in sorted(source.iterdir())
            for name, why in LEFT_OUT.items()
            if path.name.startswith(name)
        ]
        tensors: dict[str, Mapping[str, TensorSource]] = {MODEL: weights_in(source)}
        settings: dict[str, Any] = {}
        if (source / OPTIMIZER_FILE).is_file():
            try:
                tensors[OPTIMIZER], settings = _state(source / OPTIMIZER_FILE, model)
            except Damaged:
                raise
            except CheckpointError as error:
                left_out.append(f"the optimiser's state: {error}")
        state = tensors.get(OPTIMIZER, {})
        return Content(
            tensors,
            model=model,
            step=_step(state),
            optimizer="AdamW" if state else None,
            settings=settings,
            left_out=tuple(left_out),
        )


def _state(path: Path, model: Path) -> tuple[dict[str, TensorSource], dict[str, Any]]:
    """AdamW's state by transformers' names, and the settings in its groups."""
    from cairn.formats.torch_file.pickled import load_pickled

    content = load_pickled(path)
    try:
        groups, states = content["param_groups"], content["state"]
        numbers = [number for group in groups for number in group["params"]]
        sizes = [len(group["params"]) for group in groups]
        kinds = {kind for state in states.values() for kind in state.keys()}  # noqa: SIM118 # which must be a dictionary
        missing = set(numbers) ^ set(states)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{path}: holds no state of an optimiser ({error!r})") from None
    if kinds != set(STATE):
        raise CheckpointError(f"{path.name} has {', '.join(sorted(map(str, kinds)))}, which is not AdamW's")
    if len(sizes) == 2:
        decaying, others = groups_of(model)
        order = decaying | others if sizes == [len(decaying), len(others)] else {}
    else:
        order = weights_in_order(model)
    if missing or not order or len(numbers) != len(order):
        raise CheckpointError(
            f"{path.name} has groups of {sizes} weights, which are not the model's in an order that is known"
        )

    def misfit(number: Any, found: list[int], name: str, shape: list[int]) -> str:
        return (
            f"{path.name} has the shape {found} at number {number}, where the model has {name} with "
            f"{shape}: its order is another one"
        )

    return state_by_name(order, numbers, states, path, misfit), settings_of(groups, path)


def _step(state: Mapping[str, TensorSource]) -> int | None:
    """How many updates the optimiser has made; None if there is no state."""
    source = next((one for name, one in state.items() if name.endswith(".step")), None)
    if source is None:
        return None
    from cairn.checkpoint.tensors.stream_writer import value_of  # imports torch

    return int(value_of(source))
