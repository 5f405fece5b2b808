"""Puts together what verl and SkyRL hold of a run: the policy, and a critic if there is one."""

# Values from a pickle have no types until they are checked.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import CRITIC, CRITIC_OPTIMIZER, MODEL, OPTIMIZER
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.formats.base import Content
from cairn.formats.common.value_head import value_names
from cairn.formats.torch_file.safe_pickle import ForbiddenPickle
from cairn.formats.verl_model import ModelFolder, OptimizerState
from cairn.formats.verl_places import Places, places_in
from cairn.model.hub_layout import Layout, hub_layout
from cairn.model.untrusted_config import load_config
from cairn.run.errors import UsageError

MODEL_FOLDERS = ("huggingface", "")
"""Where a model's folder may hold config.json and the tokenizer."""
BESIDE = {
    "data.pt": "the position in the data; Cairn begins with its own data set",
    "trainer_state.pt": "the program's own counters and settings",
}
"""What a step's folder holds beside the models, and why that is not taken over."""


def read(places: Places, model: Path | None) -> Content:
    """The content of a checkpoint; see `Verl.read`."""
    if places.policy.name == "critic":
        raise CheckpointError(
            f"{places.policy}: is a critic, and a run begins with a policy: import the folder that both are "
            "in. A critic alone begins a new run's once its weights are merged with `python -m "
            f"verl.model_merger merge --backend fsdp --local_dir {places.policy} --target_dir OUT`: "
            "trainer.critic.model = OUT"
        )
    policy = _policy(ModelFolder.at(places.policy), model)
    critic = places.critic and _critic(ModelFolder.at(places.critic))
    parts = [policy, *([critic] if critic else [])]
    steps = policy.optimizer.steps
    left_out = [*_beside(places), *(line for part in parts for line in part.left_out())]
    if steps and places.number not in (None, steps):
        left_out.append(
            f"global_step_{places.number} is the program's own count; Cairn counts the optimiser's "
            f"steps: {steps}"
        )
    if critic and (steps, critic.optimizer.steps) != (steps, steps):
        left_out.append(
            f"the critic's optimiser has made {critic.optimizer.steps} steps, and the policy's {steps}; the "
            "critic's learning rate goes by the policy's from now on"
        )
    return Content(
        tensors={stem: named for part in parts for stem, named in part.tensors().items()},
        model=policy.about,
        critic=critic.about if critic else None,
        step=steps if steps else places.number,
        optimizer="AdamW" if policy.optimizer.tensors else None,
        settings={name: value for part in parts for name, value in part.settings().items()},
        left_out=tuple(left_out),
    )


@dataclass(frozen=True)
class _Part:
    """A model of the run.

    stems: of its weights, and of its optimiser's state. section: of its settings, with a dot. names: what
    its tensors are called, by the program's names; others are left out.
    """

    source: ModelFolder
    about: Path
    weights: Mapping[str, TensorSource]
    optimizer: OptimizerState
    stems: tuple[str, str]
    names: Mapping[str, str]
    unused: frozenset[str] = frozenset()
    section: str = ""

    def tensors(self) -> dict[str, Mapping[str, TensorSource]]:
        """By stem and name."""
        weights = {own: self.weights[name] for name, own in self.names.items()}
        state = {
            f"{self.names[name]}.{kind}": source
            for (name, _, kind), source in (
                (key.rpartition("."), source) for key, source in self.optimizer.tensors.items()
            )
        }
        return {self.stems[0]: weights, **({self.stems[1]: state} if state else {})}

    def settings(self) -> dict[str, object]:
        """Those of its optimiser."""
        return {self.section + name: value for name, value in self.optimizer.settings.items()}

    def left_out(self) -> Iterator[str]:
        """What is not taken over, one sentence each."""
        folder = self.source.folder.name
        whose = f"{folder}/: " if self.section else ""
        if self.unused:
            yield f"{whose}{listed(self.unused)}: no value depends on it"
        if not self.optimizer.tensors:
            yield f"{folder}/ has no optimiser state: weights only"
        try:
            extra = self.source.extra()
        except ForbiddenPickle as error:
            yield f"{whose}{error}"
            return
        if schedule := extra.get("lr_scheduler"):
            at = schedule.get("last_epoch") if isinstance(schedule, dict) else None
            yield (
                f"{whose}lr_scheduler: the state of the learning rate's schedule (at step {at}); "
                f"set `[trainer.{self.section}scheduler]`"
            )
        if extra.get("rng"):
            yield f"{whose}rng: the state of random generators; Cairn draws by seed and step"
        if extra.get("client_state"):
            yield f"{whose}client_state: the program's own values"


def _policy(source: ModelFolder, given: Path | None) -> _Part:
    weights = source.weights()
    about = _about(source.folder, given)
    names = {name: name for name in weights}
    optimizer = source.optimizer(weights, lambda: _trained(names, hub_layout(load_config(about))))
    return _Part(source, about, weights, optimizer, (MODEL, OPTIMIZER), names)


def _critic(source: ModelFolder) -> _Part:
    weights = source.weights()
    about = _about(source.folder, None)
    found = value_names(weights, load_config(about), source.folder)
    own = {name: found.names.get(name, name) for name in weights}
    optimizer = source.optimizer(weights, lambda: _trained(own, found.layout), idle=found.unused)
    stems = (CRITIC, CRITIC_OPTIMIZER)
    return _Part(source, about, weights, optimizer, stems, found.names, found.unused, "critic.")


def _trained(own: Mapping[str, str], layout: Layout) -> list[str]:
    """The names of the model's parameters, in its order: not buffers, and tied ones once.

    Args:
        own: Cairn's names, by the program's.
    """
    places = layout.find(own.values())
    tied = layout.tied.keys() | layout.tied_in_memory.keys()
    buffers = {name for name, place in places.items() if place.name in layout.buffers}
    return [
        name for name, mine in own.items() if mine not in buffers and (mine in places or mine not in tied)
    ]


def _about(folder: Path, given: Path | None) -> Path:
    """The folder with config.json."""
    beside = (folder / name for name in MODEL_FOLDERS)
    found = given or next((place for place in beside if (place / "config.json").is_file()), None)
    if found is None:
        what = "put that of its model there" if folder.name == "critic" else "give --model FOLDER"
        raise UsageError(f"{folder}: has no huggingface/config.json; {what}")
    return found


def _beside(places: Places) -> Iterator[str]:
    """What lies beside the models and is not taken over, one sentence each."""
    if places.step is None:
        return
    for name, why in BESIDE.items():
        if (places.step / name).exists():
            yield f"{name}: {why}"
    if places.critic is None and (places.step / "critic").exists():
        if places_in(places.step / "critic") is None:
            yield "critic: holds no model_world_size_W_rank_R.pt, and is not taken over"
        else:
            yield f"critic: is taken over if you give {places.step}, which holds both"
