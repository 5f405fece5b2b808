"""Reads the folders of verl and SkyRL: weights and AdamW's state from each rank's shards, and the step."""

# Values from a pickle have no types until they are checked.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cairn.checkpoint.dtypes import DTYPES
from cairn.checkpoint.formats.adamw import MOMENTS, SETTINGS, settings_of, whole_steps
from cairn.checkpoint.formats.content import Content, Source, listed
from cairn.checkpoint.formats.dtensors import ALLOWED, is_tensor, joined, read_ranks
from cairn.checkpoint.formats.foreign import load_config
from cairn.checkpoint.formats.hub import hub_layout
from cairn.checkpoint.formats.pickled import held
from cairn.checkpoint.formats.safe_pickle import Record, Refused, ignored
from cairn.checkpoint.formats.torch_stream import Stream, read_object
from cairn.checkpoint.formats.verl_places import Places, ranks_in
from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step import MODEL, OPTIMIZER
from cairn.run.errors import UsageError
from cairn.run.files import read_json

MODEL_FOLDERS = ("huggingface", "")
"""Where a policy's folder may hold config.json and the tokenizer."""
BESIDE = {
    "critic": "merge its weights with verl's model_merger, and begin Cairn's with them: trainer.critic.model",
    "data.pt": "the position in the data; Cairn begins with its own data set",
    "trainer_state.pt": "the program's own counters and settings",
}
"""What a step's folder holds beside the policy, and why that is not taken over."""
MERGER = (
    "is of FSDP1, whose optimiser has flat pieces of several weights. Merge the weights with "
    "`python -m verl.model_merger merge --backend fsdp --local_dir {folder} --target_dir OUT`, "
    "and import OUT with --format hf"
)


class _Opaque(Record):
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


def read(places: Places, model: Path | None) -> Content:
    """The content of a checkpoint; see `Verl.read`."""
    return _Reading(places, model, _world_size(places.policy)).content()


@dataclass(frozen=True)
class _Reading:
    """A folder that is being read."""

    places: Places
    given: Path | None
    world_size: int

    def content(self) -> Content:
        """All of it."""
        policy = self.places.policy
        self._check_version()
        ranks = self._ranks("model")
        weights = self._weights(ranks)
        state, groups = self._optimizer(weights)
        steps = {
            whole_steps(_number(source), policy) for name, source in state.items() if name.endswith(".step")
        }
        left_out = [*self._left_out()]
        if steps and self.places.number not in (None, max(steps)):
            left_out.append(
                f"global_step_{self.places.number} is the program's own count; Cairn counts the optimiser's "
                f"steps: {max(steps)}"
            )
        if not state:
            left_out.append(f"{policy.name}/ has no optimiser state: weights only")
        return Content(
            tensors={MODEL: weights, **({OPTIMIZER: state} if state else {})},
            model=self._model(),
            step=max(steps) if steps else self.places.number,
            optimizer="AdamW" if state else None,
            settings=settings_of(groups, policy),
            left_out=tuple(left_out),
        )

    def _check_version(self) -> None:
        """Check that FSDP2 wrote the folder, without adapters.

        Raises:
            CheckpointError: it did not.
        """
        policy = self.places.policy
        if policy.name == "critic":
            raise CheckpointError(
                f"{policy}: is a critic, and a run begins with a policy. Merge its weights with "
                f"`python -m verl.model_merger merge --backend fsdp --local_dir {policy} --target_dir OUT`, "
                "and begin Cairn's critic with them: trainer.critic.model = OUT"
            )
        if (policy / "lora_adapter").exists():
            self._refuse_adapter(["lora_adapter/"])
        about = read_json(policy / "fsdp_config.json")
        if isinstance(about, dict) and (
            about.get("FSDP_version") == 1 or about.get("fsdp_strategy") == "fsdp"
        ):
            self._refuse_old()

    def _refuse_old(self) -> None:
        policy = self.places.policy
        raise CheckpointError(f"{policy}: {MERGER.format(folder=policy)}")

    def _refuse_adapter(self, names: Collection[str]) -> None:
        raise CheckpointError(
            f"{self.places.policy}: was trained with LoRA ({listed(names)}), whose optimiser has the "
            "adapter's weights only. Merge the adapter into its base model with peft, and import that with "
            "--format hf"
        )

    def _ranks(self, kind: str) -> list[dict[str, Any]]:
        """What each rank's file of a kind holds.

        Raises:
            CheckpointError: it is of FSDP1.
            Damaged: it holds something else.
        """
        policy = self.places.policy
        paths = [policy / f"{kind}_world_size_{self.world_size}_rank_{n}.pt" for n in range(self.world_size)]
        try:
            found = read_ranks(Stream(path, 0, path.stat().st_size) for path in paths)
        except Refused as error:
            if "sharded_tensor" in str(error):
                self._refuse_old()
            raise
        for path, value in zip(paths, found, strict=True):
            if not isinstance(value, dict):
                raise Damaged(f"{path}: holds a {type(value).__name__} where a dictionary should be")
        return found

    def _weights(self, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Source]:
        """The weights by name."""
        adapters = [name for name in ranks[0] if "lora_" in str(name)]
        if adapters:
            self._refuse_adapter(adapters)
        weights: dict[str, Source] = {}
        for name in _same_keys(ranks, f"{self.places.policy}: the weights"):
            parts = [rank[name] for rank in ranks]
            if not all(is_tensor(part) for part in parts):
                raise Damaged(f"{self.places.policy}: {name} is no tensor")
            weights[str(name)] = joined(str(name), parts)
        return weights

    def _optimizer(self, weights: Mapping[str, Source]) -> tuple[dict[str, Source], list[dict[str, Any]]]:
        """AdamW's state by the names of the weights, and the settings of its groups.

        Args:
            weights: in the order in which the model has them.

        Raises:
            CheckpointError: it is another optimiser's, or that of other weights.
        """
        where = self.places.policy
        if not (where / f"optim_world_size_{self.world_size}_rank_0.pt").is_file():
            return {}, []
        ranks = self._ranks("optim")
        if not ranks[0]:
            return {}, []
        try:
            groups, states = ranks[0]["param_groups"], [rank["state"] for rank in ranks]
            numbers = [number for group in groups for number in group["params"]]
        except (KeyError, TypeError) as error:
            raise Damaged(f"{where}: holds no state of an optimiser ({error!r})") from None
        owners = _same_keys(states, f"{where}: the optimiser's state")
        names = self._names(groups, numbers, owners, weights)
        state: dict[str, Source] = {}
        for owner in owners:
            kinds = _same_keys([rank[owner] for rank in states], f"{where}: the state of {owner}")
            if set(kinds) != set(MOMENTS):
                raise CheckpointError(
                    f"{where}: the optimiser has {', '.join(sorted(map(str, kinds)))}, not the state of AdamW"
                )
            weight = weights[names[owner]]
            for kind in MOMENTS:
                name = f"{names[owner]}.{kind}"
                source = _part(name, [rank[owner][kind] for rank in states], where)
                if kind != "step" and source.spec.shape != weight.spec.shape:
                    self._refuse_shape(name, source, weight)
                state[name] = source
        settings = [{key: group[key] for key in SETTINGS if key in group} for group in groups]
        return state, settings

    def _refuse_shape(self, name: str, source: Source, weight: Source) -> None:
        if len(source.spec.shape) == 1 and len(weight.spec.shape) > 1:  # FSDP1's flat parameters
            self._refuse_old()
        raise CheckpointError(
            f"{self.places.policy}: {name} has shape {list(source.spec.shape)}, and the weight "
            f"{list(weight.spec.shape)}"
        )

    def _names(
        self,
        groups: Sequence[Mapping[str, Any]],
        numbers: Sequence[Any],
        owners: Collection[Any],
        weights: Mapping[str, Source],
    ) -> dict[Any, str]:
        """The weight of each entry of the optimiser's state, which is a name or a number.

        Numbers count the weights in the order of the model's parameters.

        Raises:
            CheckpointError: the numbers can't be those of the model's weights.
        """
        where = self.places.policy
        if all(isinstance(owner, str) for owner in owners):
            if strange := [owner for owner in owners if owner not in weights]:
                raise CheckpointError(f"{where}: optimiser state without weights: {listed(strange)}")
            return {owner: owner for owner in owners}
        names: list[Any] = [name for group in groups for name in group.get("param_names", ())]
        if not names:
            names = self._trained(list(weights))
            if sum(bool(group["params"]) for group in groups) > 1:
                raise CheckpointError(
                    f"{where}: the optimiser has {len(groups)} groups of weights, which it numbers anew, so "
                    "that no number tells its weight; without its files, the weights alone are imported"
                )
        if len(names) != len(numbers) or not set(names) <= weights.keys() or set(owners) != set(numbers):
            raise CheckpointError(
                f"{where}: the optimiser has the state of {len(owners)} of {len(numbers)} weights, and the "
                f"model has {len(names)}; all of them must have been trained"
            )
        return dict(zip(numbers, names, strict=True))

    def _trained(self, order: Sequence[str]) -> list[str]:
        """The names of the model's parameters, in its order: not buffers, and tied ones once."""
        layout = hub_layout(load_config(self._model()))
        places = layout.find(order)
        tied = layout.tied.keys() | layout.tied_in_memory.keys()
        buffers = {name for name, place in places.items() if place.name in layout.buffers}
        return [name for name in order if name not in buffers and (name in places or name not in tied)]

    def _model(self) -> Path:
        """The folder with config.json.

        Raises:
            UsageError: there is none.
        """
        beside = (self.places.policy / name for name in MODEL_FOLDERS)
        found = self.given or next((folder for folder in beside if (folder / "config.json").is_file()), None)
        if found is None:
            raise UsageError(
                f"{self.places.policy}: has no huggingface/config.json; give the folder of its model with "
                "--model FOLDER"
            )
        return found

    def _left_out(self) -> Iterator[str]:
        """What is not taken over, one sentence each."""
        if self.places.step is not None:
            for name, why in BESIDE.items():
                if (self.places.step / name).exists():
                    yield f"{name}: {why}"
        path = self.places.policy / f"extra_state_world_size_{self.world_size}_rank_0.pt"
        if not path.is_file():
            return
        try:
            extra = read_object(Stream(path, 0, path.stat().st_size), _EXTRA)
        except Refused as error:
            yield f"{path.name}: not read, as it holds more than plain values: {error}"
            return
        extra = extra if isinstance(extra, dict) else {}
        if schedule := extra.get("lr_scheduler"):
            at = schedule.get("last_epoch") if isinstance(schedule, dict) else None
            yield (
                f"lr_scheduler: the state of the learning rate's schedule (at step {at}); "
                "set `[trainer.scheduler]`"
            )
        if extra.get("rng"):
            yield "rng: the state of random generators; Cairn draws by seed and step"
        if extra.get("client_state"):
            yield "client_state: the program's own values"


def _world_size(policy: Path) -> int:
    """The number of ranks that saved a folder.

    Raises:
        FileNotFoundError: a rank's file is missing.
        CheckpointError: there are files of different numbers of ranks.
    """
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
    """The keys of a dictionary that each rank has.

    Raises:
        Damaged: they differ.
    """
    if not all(isinstance(rank, dict) and rank.keys() == ranks[0].keys() for rank in ranks):
        raise Damaged(f"{what}: not the same on all ranks")
    return list(ranks[0])


def _part(name: str, parts: Sequence[Any], where: Path) -> Source:
    """A tensor of the optimiser's state; a step may also be a number.

    Raises:
        Damaged: it is none.
    """
    if all(is_tensor(part) for part in parts):
        return joined(name, parts)
    if name.endswith(".step") and all(type(part) in (int, float) and part == parts[0] for part in parts):
        return held(name, torch.tensor(float(parts[0])), where)
    raise Damaged(f"{where}: {name} is no tensor")


def _number(source: Source) -> float:
    """The value of a tensor of one value.

    Raises:
        Damaged: it has more.
    """
    if source.spec.shape not in ((), (1,)):
        raise Damaged(f"{source.spec.name} has shape {list(source.spec.shape)} instead of one value")
    value = torch.empty(1, dtype=DTYPES[source.spec.dtype])
    source.fill(0, value)
    return float(value.item())
