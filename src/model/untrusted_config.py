"""What is checked of any folder of another program before it is read."""

import contextlib
import re
import stat
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cairn.checkpoint.manifest import Damaged
from cairn.run.errors import CairnError
from cairn.run.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MAX_CONFIG_BYTES = 16 << 20
MOST = {
    r"(num|n)_.*layers?|n_layer|num_.*blocks": 1 << 12,
    r".*experts.*": 1 << 16,
    r".*_(size|dim|rank)|n_embd|d_model": 1 << 32,
}
"""Names of numbers in configurations, and the largest that are taken."""


def check_plain(source: Path) -> None:
    """Check that nothing in a file or folder is a pipe, a device or a socket: reading one may never end.

    Links are followed, as Hugging Face's cache has them.

    Raises:
        Damaged: something is.
    """
    for path in (source, *source.rglob("*")):
        try:
            mode = path.stat().st_mode
        except OSError:  # a link to nothing; whoever needs the file says so
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise Damaged(f"{path}: is neither a file nor a folder, and is not read")


def check_link(path: Path) -> None:
    """Check that a file which is copied is none of other folders: a link may show what is not the model's.

    Links within the folder, and into Hugging Face's cache, where a model's folder has nothing else, are fine.

    Raises:
        Damaged: it is one.
    """
    folder, real = path.parent.resolve(), path.resolve()
    blobs = folder.parent.parent / "blobs"
    if not real.is_relative_to(folder) and real.parent != blobs:
        raise Damaged(f"{path}: is a link to {real}, which is not copied; put a copy in its place")


def load_config(folder: Path) -> "PreTrainedConfig":
    """The configuration in a folder's config.json; code that it names is not loaded.

    Raises:
        Damaged: it is invalid, describes no model that transformers knows, or has absurd numbers.
    """
    from transformers import AutoConfig

    path = folder / "config.json"
    if path.is_file() and (size := path.stat().st_size) > MAX_CONFIG_BYTES:
        raise Damaged(f"{path}: has {size} bytes; at most {MAX_CONFIG_BYTES} are read")
    _check_numbers(path, read_json(path, dict[str, Any]) or {})
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)  # pyright: ignore # typed in part
    except Exception as error:  # transformers raises whatever a wrong value runs into
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise Damaged(f"{path}: is no configuration of a model that transformers knows: {reason}") from None


@contextlib.contextmanager
def making_model(config: "PreTrainedConfig") -> Generator[None]:
    """A context in which transformers makes a model of a configuration that may be a wrong one.

    Raises:
        Damaged: it can't; transformers raises whatever a wrong value runs into.
    """
    try:
        yield
    except (CairnError, OSError, MemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Damaged(
            f"config.json describes a {config.model_type} that transformers can't make: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _check_numbers(path: Path, content: object, name: str = "") -> None:
    """Check that a model of these numbers can be laid out."""
    if isinstance(content, dict):
        for key, value in cast("dict[str, Any]", content).items():
            _check_numbers(path, value, key)
    elif isinstance(content, list):
        for value in cast("list[Any]", content):
            _check_numbers(path, value, name)
    elif isinstance(content, int):
        most = next((most for pattern, most in MOST.items() if re.fullmatch(pattern, name)), None)
        if most is not None and abs(content) > most:
            raise Damaged(f"{path}: {name} is {content}; at most {most} is taken")
