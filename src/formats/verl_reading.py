"""Reads what verl and SkyRL hold of a run: the policy, and a critic if there is one.

Each rank saved its own shards of a model and of its optimiser.
"""

# Values from a pickle have no types until they are checked.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import CRITIC, CRITIC_OPTIMIZER, MODEL, OPTIMIZER
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.checkpoint.tensors.stream_writer import value_of
from cairn.formats.base import Content, folder_of_model
from cairn.formats.common.adamw import SETTINGS, STATE, settings_of, whole_steps
from cairn.formats.common.value_head import value_names
from cairn.formats.dcp.dtensors import ALLOWED, is_tensor, joined
from cairn.formats.torch_file.pickled import held
from cairn.formats.torch_file.safe_pickle import ForbiddenPickle, PickledObject, ignored
from cairn.formats.torch_file.torch_stream import read_file
from cairn.formats.verl_places import Places, places_in, ranks_in
from cairn.model.hub_layout import Layout, hub_layout
from cairn.model.untrusted_config import load_config
from cairn.run.errors import UsageError
from cairn.run.files import read_json

MERGER = (
    "is of FSDP1, whose optimiser has flat pieces of several weights. Merge the weights with "
    "`python -m verl.model_merger merge --backend fsdp --local_dir {folder} --target_dir OUT`, "
    "and import OUT with --format hf"
)


class _Opaque(PickledObject):
    """Stands for arrays of NumPy, in which random generators are stored."""

    def __init__(self, *_: object):
        super().__init__()

    def set(self, state: object) -> None:
        """Take nothing."""


_EXTRA = {
    **ALLOWED,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Opaque for core in ("core", "_core")},
    ("numpy", "ndarray"): ignored,
    ("numpy", "dtype"): _Opaque,
    ("_codecs", "encode"): ignored,
}


@dataclass(frozen=True)
class OptimizerState:
    """What a folder holds of an optimiser: tensors by `<weight>.exp_avg`, settings by the names that Cairn's
    have, and the number of its updates; None without state."""

    tensors: Mapping[str, TensorSource]
    settings: Mapping[str, Any]
    steps: int | None


@dataclass(frozen=True)
class ModelFolder:
    """The folder of one model: what each rank held of it."""

    folder: Path
    world_size: int

    @staticmethod
    def at(folder: Path) -> "ModelFolder":
        """The folder, after a look at what files there are.

        Raises:
            FileNotFoundError: a rank's file is missing.
            CheckpointError: FSDP1 wrote it, or it has an adapter, or files of different numbers of ranks.
        """
        found = ModelFolder(folder, _world_size(folder))
        if (folder / "lora_adapter").exists():
            found._refuse_adapter(["lora_adapter/"])
        about = read_json(folder / "fsdp_config.json")
        if isinstance(about, dict) and (
            about.get("FSDP_version") == 1 or about.get("fsdp_strategy") == "fsdp"
        ):
            found._refuse_old()
        return found

    def weights(self) -> dict[str, TensorSource]:
        """The weights by name, in the order in which the model has them.

        Raises:
            CheckpointError: it is of FSDP1, or has an adapter.
            Damaged: the shards make no whole tensors.
        """
        ranks = self._ranks("model")
        adapters = [name for name in ranks[0] if "lora_" in str(name)]
        if adapters:
            self._refuse_adapter(adapters)
        weights: dict[str, TensorSource] = {}
        for name in _same_keys(ranks, f"{self.folder}: the weights"):
            parts = [rank[name] for rank in ranks]
            if not all(is_tensor(part) for part in parts):
                raise Damaged(f"{self.folder}: {name} is no tensor")
            weights[str(name)] = joined(str(name), parts)
        return weights

    def optimizer(
        self,
        weights: Mapping[str, TensorSource],
        trained: Callable[[], list[str]],
        idle: Collection[str] = (),
    ) -> OptimizerState:
        """The state of AdamW.

        Args:
            weights: in the order in which the model has them.
            trained: gives the names of the model's parameters, in their order, for optimisers that number
                them.
            idle: weights that may have no state, and whose state is passed over.

        Raises:
            CheckpointError: it is another optimiser's, or that of other weights.
        """
        where = self.folder
        if not (where / f"optim_world_size_{self.world_size}_rank_0.pt").is_file():
            return OptimizerState({}, {}, None)
        ranks = self._ranks("optim")
        if not ranks[0]:
            return OptimizerState({}, {}, None)
        try:
            groups, states = ranks[0]["param_groups"], [rank["state"] for rank in ranks]
            numbers = [number for group in groups for number in group["params"]]
        except (KeyError, TypeError) as error:
            raise Damaged(f"{where}: holds no state of an optimiser ({error!r})") from None
        owners = _same_keys(states, f"{where}: the optimiser's state")
        names = self._names(groups, numbers, owners, weights, trained, idle)
        state: dict[str, TensorSource] = {}
        for owner in owners:
            if names[owner] in idle:
                continue
            kinds = _same_keys([rank[owner] for rank in states], f"{where}: the state of {owner}")
            if set(kinds) != set(STATE):
                raise CheckpointError(
                    f"{where}: the optimiser has {', '.join(sorted(map(str, kinds)))}, not the state of AdamW"
                )
            weight = weights[names[owner]]
            for kind in STATE:
                name = f"{names[owner]}.{kind}"
                source = _part(name, [rank[owner][kind] for rank in states], where)
                if kind != "step" and source.spec.shape != weight.spec.shape:
                    self._refuse_shape(name, source, weight)
                state[name] = source
        settings = [{key: group[key] for key in SETTINGS if key in group} for group in groups]
        steps = [whole_steps(value_of(one), where) for name, one in state.items() if name.endswith(".step")]
        return OptimizerState(state, settings_of(settings, where), max(steps, default=None))

    def extra(self) -> Mapping[str, Any]:
        """What the first rank saved beside: the schedule's state, random generators and the like.

        Raises:
            Refused: there is more than plain values.
        """
        path = self.folder / f"extra_state_world_size_{self.world_size}_rank_0.pt"
        if not path.is_file():
            return {}
        try:
            extra = read_file(path, _EXTRA)
        except ForbiddenPickle as error:
            raise ForbiddenPickle(
                f"{path.name}: not read, as it holds more than plain values: {error}"
            ) from None
        return extra if isinstance(extra, dict) else {}

    def _refuse_old(self) -> None:
        raise CheckpointError(f"{self.folder}: {MERGER.format(folder=self.folder)}")

    def _refuse_adapter(self, names: Collection[str]) -> None:
        raise CheckpointError(
            f"{self.folder}: was trained with LoRA ({listed(names)}), whose optimiser has the "
            "adapter's weights only. Merge the adapter into its base model with peft, and import that with "
            "--format hf"
        )

    def _ranks(self, kind: str) -> list[dict[str, Any]]:
        """What each rank's file of a kind holds."""
        folder = self.folder
        paths = [folder / f"{kind}_world_size_{self.world_size}_rank_{n}.pt" for n in range(self.world_size)]
        try:
            found = [read_file(path, ALLOWED) for path in paths]
        except ForbiddenPickle as error:
            if "sharded_tensor" in str(error):
                self._refuse_old()
            raise
        for path, value in zip(paths, found, strict=True):
            if not isinstance(value, dict):
                raise Damaged(f"{path}: holds a {type(value).__name__} where a dictionary should be")
        return found

    def _refuse_shape(self, name: str, source: TensorSource, weight: TensorSource) -> None:
        if len(source.spec.shape) == 1 and len(weight.spec.shape) > 1:  # FSDP1's flat parameters
            self._refuse_old()
        raise CheckpointError(
            f"{self.folder}: {name} has shape {list(source.spec.shape)}, and the weight "
            f"{list(weight.spec.shape)}"
        )

    def _names(
        self,
        groups: Sequence[Mapping[str, Any]],
        numbers: Sequence[Any],
        owners: Collection[Any],
        weights: Mapping[str, TensorSource],
        trained: Callable[[], list[str]],
        idle: Collection[str],
    ) -> dict[Any, str]:
        """The weight of each entry of the optimiser's state, which is a name or a number.

        Numbers count the weights in the order of the model's parameters.
        """
        where = self.folder
        if all(isinstance(owner, str) for owner in owners):
            if strange := [owner for owner in owners if owner not in weights]:
                raise CheckpointError(f"{where}: optimiser state without weights: {listed(strange)}")
            return {owner: owner for owner in owners}
        names: list[Any] = [name for group in groups for name in group.get("param_names", ())]
        if not names:
            names = trained()
            if sum(bool(group["params"]) for group in groups) > 1:
                raise CheckpointError(
                    f"{where}: the optimiser has {len(groups)} groups of weights, which it numbers anew, so "
                    "that no number tells its weight; without its files, the weights alone are imported"
                )
        found = dict(zip(numbers, names, strict=False))
        needed = {number for number, name in found.items() if name not in idle}
        known = len(names) == len(numbers) and set(names) <= weights.keys()
        if not known or not needed <= set(owners) <= set(numbers):
            raise CheckpointError(
                f"{where}: the optimiser has the state of {len(owners)} of {len(numbers)} weights, and the "
                f"model has {len(names)}; all of them must have been trained"
            )
        return found


def _world_size(policy: Path) -> int:
    """The number of ranks that saved a folder."""
    ranks = ranks_in(policy)
    if len(ranks) != 1:
        raise CheckpointError(
            f"{policy}: holds files of {' and of '.join(map(str, sorted(ranks)))} ranks; "
            "remove those that are old"
        )
    ((world_size, there),) = ranks.items()
    for rank in range(world_size):
        if rank not in there:
            path = policy / f"model_world_size_{world_size}_rank_{rank}.pt"
            raise FileNotFoundError(2, "the shards of a rank are missing", str(path))
    return world_size


def _same_keys(ranks: Sequence[Any], what: str) -> list[Any]:
    """The keys of a dictionary that each rank has, which must be the same."""
    if not all(isinstance(rank, dict) and rank.keys() == ranks[0].keys() for rank in ranks):
        raise Damaged(f"{what}: not the same on all ranks")
    return list(ranks[0])


def _part(name: str, parts: Sequence[Any], where: Path) -> TensorSource:
    """A tensor of the optimiser's state; a step may also be a number."""
    if all(is_tensor(part) for part in parts):
        return joined(name, parts)
    if name.endswith(".step") and all(type(part) in (int, float) and part == parts[0] for part in parts):
        return held(name, torch.tensor(float(parts[0])), where)
    raise Damaged(f"{where}: {name} is no tensor")


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
        weights = {own: self.weights[name] for name, own in self.names.items()}
        state = {
            f"{self.names[name]}.{kind}": source
            for (name, _, kind), source in (
                (key.rpartition("."), source) for key, source in self.optimizer.tensors.items()
            )
        }
        return {self.stems[0]: weights, **({self.stems[1]: state} if state else {})}

    def settings(self) -> dict[str, object]:
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
    found = folder_of_model(given, *(folder / name for name in MODEL_FOLDERS))
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
