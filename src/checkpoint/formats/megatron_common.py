"""What a checkpoint of Megatron holds beside tensors: iteration, groups of the optimiser, and arguments."""

# torch and what a pickle holds are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from cairn.checkpoint.formats.dcp_metadata import DcpIndex
from cairn.checkpoint.formats.safe_pickle import Refused
from cairn.checkpoint.layout import MALFORMED
from cairn.checkpoint.manifest import CheckpointError, Damaged

FILE = "common.pt"
"""The file of megatron-core before 0.19."""
KEY = "common_state/shard_0_1"
"""The key of later versions in the checkpoint."""
MAX_BYTES = 64 << 20
_INERT = frozenset({"argparse.Namespace", "types.SimpleNamespace", "signal.Signals", "pathlib.PosixPath"})
_INERT_MODULE = "megatron."


class _Inert:
    """Stands for an object of a class that the file names; holds what the file says of it."""

    def __init__(self, *arguments: object, **fields: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update({key: value for key, value in state.items() if type(key) is str})


@dataclass(frozen=True)
class Common:
    """What is read of it.

    arguments: those of Megatron-LM's command line; empty in files of other programs. groups: the settings of
    the optimiser's groups of weights. steps: how often the optimiser has made a step, one for each optimiser.
    """

    iteration: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    groups: tuple[Mapping[str, Any], ...] = ()
    steps: frozenset[float] = frozenset()


def read_common(folder: Path, index: DcpIndex) -> Common:
    """What the folder holds; no code in it is executed.

    Raises:
        Refused: it names a class that neither Megatron nor Python has for plain values, or is too large.
        Damaged: it is not what Megatron writes.
    """
    if (folder / FILE).is_file():
        where, size = str(folder / FILE), (folder / FILE).stat().st_size
        content = _load((folder / FILE).read_bytes() if size <= MAX_BYTES else None, where)
    elif KEY in index.values:
        stream = index.values[KEY]
        where = f"{stream.path}: {KEY}"
        with open(stream.path, "rb") as file:
            file.seek(stream.offset)
            content = _load(file.read(stream.length) if stream.length <= MAX_BYTES else None, where)
        if isinstance(content, list) and len(content) == 1:
            content = content[0]
    else:
        return Common()
    if not isinstance(content, dict):
        raise Damaged(f"{where}: holds a {type(content).__name__}, not what Megatron writes")
    iteration = content.get("iteration")
    if iteration is not None and (type(iteration) is not int or iteration < 0):
        raise Damaged(f"{where}: the iteration is {iteration!r}, which is no whole number")
    found = tuple(_optimizers(content.get("optimizer")))
    groups = tuple(group for one in found for group in one.get("param_groups", ()) if isinstance(group, dict))
    arguments = content.get("args")
    try:
        steps = {float(one["state"]["common_step"]) for one in found if "common_step" in one.get("state", ())}
        steps |= {float(group["step"]) for group in groups if "step" in group}
    except (TypeError, ValueError, RuntimeError) as error:
        raise Damaged(f"{where}: the optimiser's step is no number: {error}") from None
    return Common(
        iteration, vars(arguments) if isinstance(arguments, _Inert) else {}, groups, frozenset(steps)
    )


def check_arguments(common: Common, expected: Mapping[str, object], where: Path) -> None:
    """Compare Megatron-LM's arguments with what the model in config.json has, as far as they are stored.

    Raises:
        CheckpointError: some differ; the message lists them.
    """
    wrong = [
        f"{name} is {common.arguments[name]!r} and should be {value!r}"
        for name, value in expected.items()
        if common.arguments.get(name) is not None and common.arguments[name] != value
    ]
    if wrong:
        raise CheckpointError(f"{where}: is another model than config.json describes: {'; '.join(wrong)}")


def _optimizers(value: object) -> Iterator[dict[str, Any]]:
    """The states of torch's optimisers, in the one of Megatron or in the list of those that are chained."""
    if isinstance(value, dict) and "param_groups" in value:
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _optimizers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _optimizers(inner)


def _load(data: bytes | None, where: str) -> Any:
    """The value that `torch.save` wrote; None stands for more bytes than are read.

    Raises:
        Refused: it names what is not allowed.
        Damaged: it is no such value.
    """
    if data is None:
        raise Refused(f"{where}: has more than {MAX_BYTES} bytes")
    try:
        named = get_unsafe_globals_in_checkpoint(io.BytesIO(data))
        strange = [name for name in named if name not in _INERT and not name.startswith(_INERT_MODULE)]
        if strange:
            raise Refused(f"{where}: names {', '.join(sorted(strange))}, which is not allowed")
        stand_ins: list[Any] = [(type("Inert", (_Inert,), {}), name) for name in named]
        with safe_globals(stand_ins):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        reason = next((line for line in lines if "Unsupported" in line or "GLOBAL" in line), lines[0])
        raise Refused(f"{where}: is not loaded: {reason}") from None
    except (*MALFORMED, RuntimeError, EOFError, IndexError) as error:
        lines = str(error).splitlines() or [""]
        raise Damaged(f"{where}: not written by torch.save: {lines[0]}") from None
