"""Writes GGUF files with the package gguf, piece by piece, and compares what was written."""

# torch, transformers and gguf are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.reader import DTYPE_NAMES, DTYPES, as_bytes, as_memory
from cairn.checkpoint.tensors.sharded_files import dtype_of
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.checkpoint.tensors.stream_writer import PIECE_BYTES, pieces_of
from cairn.formats.base import Content, WriteOptions, needed
from cairn.formats.gguf.gguf_file import ALIGNMENT, AT_ONCE, BLOCK, BLOCK_BYTES
from cairn.formats.gguf.gguf_model import ROPE_FACTORS, Shifted, gguf_tensors, metadata_of, rope_factors
from cairn.formats.gguf.gguf_tokenizer import tokenizer_metadata
from cairn.formats.torch_file.pickled import held
from cairn.run.files import naming

FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""GGUF's numbers of what most of a file is in."""


def write(content: Content, path: Path, options: WriteOptions) -> None:
    """Write a model, its tokenizer and its chat template; see `gguf.Gguf.write`."""
    gguf = needed("gguf", "formats")
    folder = content.model
    if folder is None:
        raise CheckpointError(f"{path}: needs a model with config.json")
    config = AutoConfig.from_pretrained(folder).get_text_config()
    tensors = gguf_tensors(content.tensors[MODEL], config, folder)
    parameters = config.to_dict()["rope_parameters"]
    if parameters.get("rope_type") == "llama3":
        factors = rope_factors(parameters, config.head_dim)
        tensors = {ROPE_FACTORS: held(ROPE_FACTORS, factors, folder), **tensors}
    kinds = {name: _kind(name, source, options) for name, source in tensors.items()}
    most = max(FILE_TYPES, key=lambda kind: sum(kinds[n] == kind and _is_matrix(tensors[n]) for n in kinds))
    values = metadata_of(config, tensors.keys())
    values["general.file_type"] = FILE_TYPES[most]
    values["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    values |= tokenizer_metadata(folder, config.vocab_size)
    if uneven := [n for n, kind in kinds.items() if kind == "Q8_0" and tensors[n].spec.shape[-1] % BLOCK]:
        raise CheckpointError(
            f"{folder}: Q8_0 needs rows of a multiple of {BLOCK} values, unlike those of {listed(uneven)}"
        )
    with naming(path):
        _write_header(gguf, path, values, tensors, kinds)
        with open(path, "ab") as file:
            file.write(bytes(-file.tell() % ALIGNMENT))
            for name, source in tensors.items():
                for data in _encoded(gguf, name, source, kinds[name]):
                    file.write(data)
                    options.on_bytes(len(data))
                file.write(bytes(-file.tell() % ALIGNMENT))


def check(
    name: str,
    back: TensorSource,
    source: TensorSource,
    options: WriteOptions,
    on_bytes: Callable[[int], None],
) -> None:
    """Compare a weight that was read back with the one that was written; see `gguf.Gguf.write`.

    Raises:
        Damaged: it differs.
    """
    kind = _kind(name, source, options)
    if back.spec.shape != source.spec.shape:
        raise Damaged(f"{name} was read back with the shape {list(back.spec.shape)}")
    for got, wanted in zip(_in_steps(back), _in_steps(source), strict=True):
        on_bytes(wanted.nbytes)
        if kind == "Q8_0":
            blocks = wanted.float().view(-1, BLOCK)
            step = blocks.abs().amax(dim=1, keepdim=True) / 127
            same = ((got.view(-1, BLOCK) - blocks).abs() <= 0.6 * step + 4e-6).all()
        elif isinstance(back, Shifted):
            same = torch.allclose(got, wanted.float(), rtol=2**-22, atol=2**-22)
        else:
            same = got.dtype == DTYPES[kind] and torch.equal(as_bytes(got), as_bytes(wanted.to(DTYPES[kind])))
        if not same:
            raise Damaged(f"{name} differs from what was written")


def _in_steps(source: TensorSource) -> Iterator[torch.Tensor]:
    """The values of a tensor in pieces of a fixed number of values, whatever its data type."""
    for piece in pieces_of(source):
        yield from piece.split(PIECE_BYTES // 64)


def _is_matrix(source: TensorSource) -> bool:
    return len(source.spec.shape) > 1


def _kind(name: str, source: TensorSource, options: WriteOptions) -> str:
    """The type as which a tensor is written."""
    if not _is_matrix(source):
        return "F32"
    if options.quantize is not None:
        routes = name.endswith((".ffn_gate_inp.weight", ".mlp.gate.weight"))
        return "F32" if routes else options.quantize.upper()
    kind = options.dtype or DTYPE_NAMES[dtype_of(source)]
    if kind not in FILE_TYPES:
        raise CheckpointError(f"{name}: GGUF has no data type {kind}; choose one with --dtype")
    return kind


def _write_header(
    gguf: Any, path: Path, values: dict[str, Any], tensors: dict[str, TensorSource], kinds: dict[str, str]
) -> None:
    writer = gguf.GGUFWriter(path, values.pop("general.architecture"))
    types = gguf.GGUFValueType
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_key_value(key, value, types.UINT32)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    import numpy as np

    for name, source in tensors.items():
        kind = gguf.GGMLQuantizationType[kinds[name]]
        count = torch.Size(source.spec.shape).numel()
        nbytes = (
            count // BLOCK * BLOCK_BYTES if kinds[name] == "Q8_0" else count * DTYPES[kinds[name]].itemsize
        )
        writer.add_tensor_info(name, source.spec.shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _encoded(gguf: Any, name: str, source: TensorSource, kind: str) -> Iterator[memoryview]:
    """A tensor's bytes in the file, in pieces."""
    for piece in pieces_of(source):
        if kind == "Q8_0":
            for part in piece.split(AT_ONCE):
                blocks = part.float().view(-1, BLOCK)
                if bool((blocks.abs() > 127 * torch.finfo(torch.float16).max).any()):
                    raise CheckpointError(f"{name} has values beyond the range of Q8_0")
                yield gguf.quants.quantize(blocks.numpy(), gguf.GGMLQuantizationType.Q8_0).reshape(-1).data
        else:
            cast = piece.to(DTYPES[kind])
            if bool((cast.isinf() & piece.isfinite()).any()):
                raise CheckpointError(f"{name} has values beyond the range of {kind}")
            yield as_memory(cast)
