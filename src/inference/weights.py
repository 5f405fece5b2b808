"""vLLM plugin: weights from safetensors files, or from a trainer's memory.

Files are validated before any of the old weights is touched.

Runs inside vLLM's processes only.
"""

import collections
import copy
import functools
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    layerwise_groups,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from cairn.inference.transfer import Source, Unchanged, WeightReceiver, read_source

logger = init_logger("vllm.cairn")

FLOATS = ("F64", "F32", "F16", "BF16")
WORKERS = min(4, os.cpu_count() or 1)
"""Threads that check and load weights; nothing is generated meanwhile."""


def register() -> None:
    """Entry point, called by vLLM in each of its processes."""
    WeightTransferEngineFactory.register_engine("filesystem", FilesystemEngine)
    register_model_loader("cairn")(RepackableLoader)


class Refused(Unchanged):
    """The weights are unusable."""

    mark = "weights refused: "


@dataclass
class FilesystemInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class FilesystemUpdateInfo(WeightTransferUpdateInfo):
    """`path`: a directory with model.safetensors, or shards and their index, or the word of a trainer that
    has them in memory. Must not change once pushed."""

    path: str


class FilesystemEngine(WeightTransferEngine[FilesystemInitInfo, FilesystemUpdateInfo]):
    """Loads a Hugging Face directory's safetensors, or a trainer's tensors, into the running model.

    All the work is in `receive_weights`: vLLM closes the session if that raises, but not if `finish` does.
    """

    init_info_cls = FilesystemInitInfo
    update_info_cls = FilesystemUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: FilesystemInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def update_weights(self, update_info: dict) -> None:
        """As in the base class, whose device synchronisation fails where there is no accelerator."""
        info = self.parse_update_info(update_info)
        files = _identities(info.path)
        self.receive_weights(info)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        if _identities(info.path) != files:
            raise RuntimeError(f"{info.path} was removed or changed while its weights were loaded")

    def receive_weights(self, update_info: FilesystemUpdateInfo) -> None:
        """Validate the files, then load them; or load what the trainer sends, layer by layer.

        Raises:
            Refused: a file or tensor is unusable; the old weights are untouched.
            Gone, NotThere: the trainer does not send them; likewise.
            RuntimeError: it has not sent all of them.
        """
        started = time.perf_counter()
        source = read_source(Path(update_info.path))
        dtype = self.model_config.dtype
        parts: Iterable[dict[str, torch.Tensor]]
        if source is None:
            weights = read_weights(update_info.path, *self._expected, dtype)
            parts, items = [weights], sum(tensor.numel() for tensor in weights.values())
        else:
            parts, items = self._from_trainer(source), sum(map(math.prod, source.shapes.values()))
        checked = time.perf_counter()
        if self._plain:
            loaded = load_and_pack(self.model, parts)
        else:
            initialize_layerwise_reload(self.model)
            loaded = {name for part in parts for name in self.model.load_weights(part.items())}
            finalize_layerwise_reload(self.model, self.model_config)
            pack_linear_weights(self.model.modules())
        if missed := {name for name, _ in self.model.named_parameters()} - loaded:
            raise RuntimeError(f"vLLM left these weights as they were: {sorted(missed)}")
        logger.info(
            "%s: %.1f MB, checked in %.3f s, loaded in %.3f s",
            update_info.path,
            items * dtype.itemsize / 1e6,
            checked - started,
            time.perf_counter() - checked,
        )

    def _from_trainer(self, source: Source) -> Iterator[dict[str, torch.Tensor]]:
        """The trainer's tensors, a layer at a time.

        Raises:
            Refused: it has other tensors than this model.
            Gone, NotThere: it does not send them.
            RuntimeError: while iterating: it broke off, or a value is not finite.
        """
        if source.device != self.device.type:
            raise Refused(
                f"the trainer has them on {source.device} and this server computes on {self.device.type}: "
                "set --trainer.weight-transport to files"
            )
        shapes, tied = self._expected
        for name in shapes.keys() ^ source.shapes.keys():
            if name not in tied:
                raise Refused(f"tensor {name} is {'missing' if name in shapes else 'unexpected'}")
        for name, shape in source.shapes.items():
            if shape != shapes[name]:
                raise Refused(f"tensor {name} has shape {shape}, not {shapes[name]}")
        names = [name for name in source.shapes if name not in tied]
        parts = self._receiver.receive(source, layerwise_groups(names), self.model_config.dtype)

        def checked() -> Iterator[dict[str, torch.Tensor]]:
            for weights in parts:
                for name, tensor in weights.items():
                    if not _is_finite(tensor):
                        raise RuntimeError(f"the trainer's tensor {name} holds NaN or infinity")
                yield weights

        return checked()

    @functools.cached_property
    def _receiver(self) -> WeightReceiver:
        return WeightReceiver(self.device)

    @functools.cached_property
    def _plain(self) -> bool:
        """Whether the parameters are the weights themselves: on the CPU, and nothing is quantized."""
        methods = {type(getattr(module, "quant_method", None)) for module in self.model.modules()}
        plain = {type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod}
        return self.device.type == "cpu" and methods <= plain

    @functools.cached_property
    def _expected(self) -> tuple[dict[str, list[int]], dict[str, str]]:
        """Shape of every tensor of the Hugging Face model, and of the tied ones what they are tied to."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.model_config.hf_config)
        shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        return shapes, model.all_tied_weights_keys


class RepackableLoader(DefaultModelLoader):
    """Loads as vLLM does by default, but keeps linear layers' weights beside the packed copies (CPU only).

    vLLM's CPU build computes from packed copies and drops the weights, which hides them from checksums; and
    after an update it does not repack a `lm_head` that is tied to the embeddings. So `pack_linear_weights`
    does all the packing, here and after every update.
    """

    def __init__(self, load_config: LoadConfig):
        load_config = copy.copy(load_config)
        load_config.load_format = "auto"
        super().__init__(load_config)

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)
        for module in model.modules():
            if isinstance(module, LinearBase):
                # vLLM's own switch for layers that are not to be packed.
                module._cpu_skip_gemm_dispatch = True

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> torch.nn.Module:
        model = super().load_model(vllm_config, model_config, prefix)
        pack_linear_weights(model.modules())
        return model


def pack_linear_weights(modules: Iterable[torch.nn.Module]) -> None:
    """Make the packed copies from which the CPU's linear layers compute anew; elsewhere there are none."""
    for module in modules:
        if hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def load_and_pack(model: torch.nn.Module, parts: Iterable[dict[str, torch.Tensor]]) -> set[str]:
    """Copy weights straight into the parameters, and pack each layer while it is in the processor's cache.

    Layers are taken by several threads while this one goes on through the `parts`; none is in two of them.
    Returns vLLM's names of the parameters that were loaded.
    """
    parameters = dict(model.named_parameters())
    users = collections.defaultdict(list)  # several modules where weights are tied
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            users[id(module.weight)].append(module)

    def load(layer: list[tuple[str, torch.Tensor]]) -> set[str]:
        with torch.no_grad():
            loaded = set(model.load_weights(layer))
            pack_linear_weights(module for name in loaded for module in users[id(parameters[name])])
        return loaded

    layers = (
        [(name, part[name]) for name in names] for part in parts for names in layerwise_groups(list(part))
    )
    with ThreadPoolExecutor(WORKERS) as workers:
        return set().union(*workers.map(load, layers))


def read_weights(
    path: str, shapes: dict[str, list[int]], tied: dict[str, str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Read and check all tensors of a model directory.

    Args:
        path: The directory, with model.safetensors or shards and their index.
        shapes: Shape of every tensor of the model.
        tied: Of the tied tensors (`lm_head.weight`, mostly) the one that each is tied to. They may be absent,
            or be there and equal that one.
        dtype: Type that the server computes with.

    Returns:
        Tensor by Hugging Face name, on the CPU, in `dtype`; mapped from the file where it has that type.

    Raises:
        Refused: something is missing, unexpected, damaged, of another shape, not floating-point, or not
            finite in `dtype`.
    """
    weights: dict[str, torch.Tensor] = {}
    for file in _files(path):
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    if name not in shapes:
                        raise Refused(f"{file}: unexpected tensor {name}")
                    if name in weights:
                        raise Refused(f"{file}: tensor {name} is in another file as well")
                    header = opened.get_slice(name)
                    shape, kind = header.get_shape(), header.get_dtype()
                    if shape != shapes[name]:
                        raise Refused(f"{file}: tensor {name} has shape {shape}, not {shapes[name]}")
                    if kind not in FLOATS:
                        raise Refused(f"{file}: tensor {name} has type {kind}, not a floating-point one")
                    weights[name] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise Refused(f"{file}: not a whole safetensors file: {error}") from None
    if missing := sorted(shapes.keys() - weights.keys() - tied.keys()):
        raise Refused(f"{path}: tensor {missing[0]} is missing" + _and_more(missing))
    for name in tied.keys() & weights.keys():
        if not torch.equal(weights.pop(name), weights[tied[name]]):
            raise Refused(f"{path}: tensor {name} differs from {tied[name]}, which the model ties it to")
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    with ThreadPoolExecutor(WORKERS) as workers:
        finite = workers.map(_is_finite, weights.values())
        for name, good in zip(weights, finite, strict=True):
            if not good:
                raise Refused(f"{path}: tensor {name} holds NaN or infinity (as {dtype})")
    return weights


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are; least and greatest are 30 times as fast as asking each, and NaN is both."""
    return tensor.numel() == 0 or all(bound.isfinite().item() for bound in tensor.aminmax())


def _identities(path: str) -> list[tuple[str, int, int]]:
    """What tells whether a directory's tensor files are still the same: name, inode, last change."""
    try:
        found = [(file.name, file.stat()) for file in sorted(Path(path).glob("*.safetensors"))]
    except OSError:
        return []
    return [(name, status.st_ino, status.st_mtime_ns) for name, status in found]


def _files(path: str) -> list[Path]:
    """The safetensors files of a model directory; a single file goes before an index, as in transformers."""
    directory = Path(path)
    if not directory.is_dir():
        raise Refused(f"{path}: not a directory")
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise Refused(f"{path}: holds neither {single.name} nor {index.name}")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise Refused(f"{index}: not an index of safetensors files: {error!r}") from None
    if outside := [name for name in names if Path(name).name != name]:
        raise Refused(f"{index}: names a file outside its directory: {outside[0]}")
    return [directory / name for name in names]


def _and_more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
