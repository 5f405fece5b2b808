"""TensorFlow checkpoints: `model.index` and `model.data-00000-of-00001`, with the hub's names."""

from pathlib import Path

from cairn.checkpoint.step_folder import MODEL
from cairn.formats.base import Content, Verification, WriteOptions
from cairn.formats.common.roundtrip import KeptValues
from cairn.formats.huggingface.huggingface import copy_companions
from cairn.formats.tf_reading import read_index, verify_data

PREFIX = "model"
INDEX = ".index"


class TensorFlow:
    """The files that `tf.raw_ops.SaveV2` and `tf.train.Checkpoint` write; TensorFlow itself isn't needed."""

    stems = (MODEL,)

    def detect(self, source: Path) -> bool:
        """Whether `source` is an index of such files, or a folder with one."""
        return _prefix(source) is not None

    def read(self, source: Path, model: Path | None = None) -> Content:
        """The weights. See `Format.read`.

        Raises:
            FileNotFoundError: there is no index, or more than one.
            Damaged: a file is invalid, or has other checksums.
            CheckpointError: tensors are of types that have no counterpart, or parts of others.
        """
        prefix = _prefix(source)
        if prefix is None:
            raise FileNotFoundError(2, f"holds no index (*{INDEX}), or several; name one", str(source))
        tensors, left_out = read_index(prefix)
        verify_data(tensors)
        beside = prefix.parent if (prefix.parent / "config.json").is_file() else None
        sources = {name: tensor.stored for name, tensor in tensors.items()}
        return Content({MODEL: sources}, model=model or beside, left_out=left_out)

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        """Write `model.index` and its data, and beside it configuration and tokenizer.

        Raises:
            CheckpointError: there is no config.json.
            OSError: a file can't be written.
        """
        from cairn.formats.tf_writer import write  # imports torch

        copy_companions(content, folder, options.dtype)
        kept = KeptValues(content, options.dtype)
        write(folder / PREFIX, kept.content.tensors[MODEL], options.on_bytes)
        return kept.read_back(self, folder)


def _prefix(source: Path) -> Path | None:
    """What the names of the files begin with; None if there are no such files, or several."""
    indexes = [source] if source.suffix == INDEX else sorted(source.glob(f"*{INDEX}"))
    prefixes = [index.with_suffix("") for index in indexes if index.is_file()]
    found = [prefix for prefix in prefixes if list(prefix.parent.glob(f"{prefix.name}.data-*-of-*"))]
    return found[0] if len(found) == 1 else None
