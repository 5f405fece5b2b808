"""What a checkpoint of Megatron holds beside tensors: iteration, groups of the optimiser, and arguments."""

# torch and what a pickle holds are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.formats.common.adamw import whole_steps
from cairn.formats.dcp.dcp_metadata import DcpIndex
from cairn.formats.torch_file.safe_pickle import PickledObject
from cairn.formats.torch_file.torch_stream import Stream, read_stream

FILE = "common.pt"
"""The file of megatron-core before 0.19."""
KEY = "common_state/shard_0_1"
"""The key of later versions in the checkpoint."""
_INERT = frozenset(
    {
        *{("argparse", "Namespace"), ("types", "SimpleNamespace"), ("signal", "Signals")},
        *{("pathlib", "PosixPath"), ("pathlib", "Path"), ("torch", "device")},
        *{("builtins", "set"), ("builtins", "bytearray"), ("builtins", "complex"), ("_codecs", "encode")},
    }
)
_INERT_MODULE = "megatron."


class _Inert(PickledObject):
    """Stands for an object of a class that the file names; holds what the file says of it."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def set(self, state: object) -> None:
        """Take the fields; they are not copied, since an object has hundreds of them."""
        if isinstance(state, dict):
            self.fields = state


class _Names(dict[tuple[str, str], Any]):
    """What stands for the classes that a file may name: for each of Megatron's, a class that does nothing."""

    def __contains__(self, key: object) -> bool:
        return key in _INERT or (isinstance(key, tuple) and str(key[0]).startswith(_INERT_MODULE))

    def __missing__(self, key: tuple[str, str]) -> Any:
        if key not in self:
            raise KeyError(key)
        return self.setdefault(key, type("Inert", (_Inert,), {}))


@dataclass(frozen=True)
class Common:
    """What is read of it.

    arguments: those of Megatron-LM's command line; empty in files of other programs. groups: the settings of
    the optimiser's groups of weights. steps: how often the optimiser has made a step, one for each optimiser.
    """

    iteration: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    groups: tuple[Mapping[str, Any], ...] = ()
    steps: frozenset[int] = frozenset()


def read_common(folder: Path, index: DcpIndex) -> Common:
    """What the folder holds; no code in it is executed.

    Raises:
        Refused: it names a class that neither Megatron nor Python has for plain values, or is too large.
        Damaged: it is not what Megatron writes.
    """
    path = folder / FILE
    if path.is_file():
        stream, where = Stream(path, 0, path.stat().st_size), str(path)
    elif KEY in index.values:
        stream = index.values[KEY]
        where = f"{stream.path}: {KEY}"
    else:
        return Common()
    content = read_stream(stream, _Names())
    if path != stream.path and isinstance(content, list) and len(content) == 1:
        content = content[0]
    if not isinstance(content, dict):
        raise Damaged(f"{where}: holds a {type(content).__name__}, not what Megatron writes")
    iteration = content.get("iteration")
    if iteration is not None and (type(iteration) is not int or iteration < 0):
        raise Damaged(f"{where}: the iteration is {iteration!r}, which is no whole number")
    found = tuple(_optimizers(content.get("optimizer")))
    arguments = content.get("args")
    try:
        groups = tuple(group for one in found for group in one["param_groups"] if isinstance(group, dict))
        steps = {
            whole_steps(one["state"]["common_step"], where)
            for one in found
            if "common_step" in one.get("state", ())
        }
        steps |= {whole_steps(group["step"], where) for group in groups if "step" in group}
    except TypeError as error:
        raise Damaged(f"{where}: not the state of an optimiser: {error}") from None
    return Common(
        iteration, arguments.fields if isinstance(arguments, _Inert) else {}, groups, frozenset(steps)
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
