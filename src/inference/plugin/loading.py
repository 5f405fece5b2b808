"""Put weights into vLLM's model: at its start, and in place of those that it has.

Runs inside vLLM's processes only.
"""

import collections
import contextlib
import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import Parameter
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from cairn.checkpoint.tensors.layout import tensor_files
from cairn.inference.plugin.routed_experts import note_experts
from cairn.inference.plugin.vllm_internals import (
    SKIP_TENSORS,
    Attention,
    DefaultModelLoader,
    LinearBase,
    MLAAttention,
    RotaryEmbedding,
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
    check_cpu_sgl_kernel,
    dispatch_cpu_unquantized_gemm,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    layerwise_groups,
    materialize_meta_tensor,
    process_weights_after_loading,
    restore_layer_refs,
)
from cairn.inference.plugin.weight_files import WORKERS
from cairn.inference.server import MODEL_REFUSED
from cairn.policy.checksums import checksum, wrapped
from cairn.policy.errors import NotHeld, Unfit

logger = init_logger("vllm.cairn")


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

    def _prepare_weights(self, *args: Any, **kwargs: Any) -> tuple[str, list[str], bool, str]:
        """As in the base class, but with the files that all other readers of a folder take."""
        folder, files, use_safetensors, index = super()._prepare_weights(*args, **kwargs)
        if index == SAFE_WEIGHTS_INDEX_NAME and use_safetensors:
            with contextlib.suppress(FileNotFoundError):
                files = [str(file) for file in tensor_files(Path(folder), "model")]
        return folder, files, use_safetensors, index

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """As in the base class; what comes is noted."""
        yield from checks_of(model).watch(super().get_all_weights(model_config, model), model_config.dtype)

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)
        for module in model.modules():
            if isinstance(module, LinearBase):
                # vLLM's own switch for layers that are not to be packed.
                cast(Any, module)._cpu_skip_gemm_dispatch = True

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> torch.nn.Module:
        model = super().load_model(vllm_config, model_config, prefix)
        check_heads(model)
        note_experts(model, vllm_config)
        rotate_all_heads(model)
        if _is_plain(model):
            spread_rows(model.modules())
        pack_linear_weights(model.modules())
        checks_of(model).note(model.named_parameters())
        return model


def check_heads(model: torch.nn.Module) -> None:
    """Refuse attention heads that vLLM would only find out about at the first request, and die of.

    Raises:
        ValueError: the kernels take no heads of this size.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            backend, size = module.get_attn_backend(), module.head_size
            if not backend.supports_head_size(size):
                sizes = ", ".join(map(str, backend.get_supported_head_sizes()))
                raise ValueError(
                    f"{MODEL_REFUSED}its attention heads have size {size} (head_dim in config.json), and "
                    f"vLLM's {backend.get_name()} takes {sizes}"
                )


def rotate_all_heads(model: torch.nn.Module) -> None:
    """Give the CPU's rotary kernel each token's heads as one vector, also where a model keeps them apart.

    Of queries and keys [tokens, heads, head size], which LFM2 passes, the kernel rotates only some heads, and
    by the angles of other tokens.
    """
    for module in model.modules():
        if isinstance(module, RotaryEmbedding) and current_platform.is_cpu():
            module.forward = functools.partial(_rotate_flat, module.forward)


def _rotate_flat(
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if query.ndim < 3:
        return rotate(positions, query, key)
    flat_query, flat_key = rotate(positions, query.flatten(1), None if key is None else key.flatten(1))
    return flat_query.view(query.shape), None if key is None else cast(torch.Tensor, flat_key).view(key.shape)


LINE = 64
"""Bytes of a line of the processor's cache."""


def spread_rows(modules: Iterable[torch.nn.Module]) -> None:
    """Store the rows of linear layers that oneDNN packs an odd number of cache lines apart.

    It takes a few values from each of 64 rows in turn. Rows that are an even number of lines apart share part
    of the cache's sets, so that lines are evicted before all of their values are taken. Embeddings, and heads
    that may be tied to them, stay as they are: compiled code reads their rows, perhaps code in vLLM's cache.
    """
    for module in modules:
        weight = getattr(module, "weight", None)
        if not hasattr(module, "cpu_linear") or weight is None or weight.ndim != 2:
            continue
        if isinstance(getattr(module, "quant_method", None), UnquantizedEmbeddingMethod):
            continue
        (rows, columns), size = weight.shape, weight.itemsize
        if columns * size % (2 * LINE) == 0 and not check_cpu_sgl_kernel(rows, columns, weight.dtype):
            weight.data = weight.new_empty(rows, columns + LINE // size)[:, :columns].copy_(weight.data)


def held_checksum(parameter: torch.Tensor) -> int:
    """The checksum of a parameter, without a copy of rows that `spread_rows` has put apart."""
    rows = parameter.detach()
    if rows.ndim == 2 and rows.shape[1] * rows.itemsize % LINE == 0 and rows.stride(1) == 1:
        return wrapped([int(rows.view(torch.int64).sum())])  # each is a whole number of words
    return checksum(rows)


def pack_linear_weights(modules: Iterable[torch.nn.Module]) -> None:
    """Make the packed copies from which the CPU's linear layers compute anew; elsewhere there are none."""
    for module in modules:
        if hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def load_weights(
    model: torch.nn.Module,
    parts: Iterable[dict[str, torch.Tensor]],
    config: ModelConfig,
    sums: Mapping[str, int],
) -> None:
    """Put other weights, in the hub's layout, into a loaded model, and process them as at its start.

    `sums` are the tensors' checksums, as far as they are known when a part comes.

    Raises:
        NotHeld: some parameters are not what came.
        Unfit: vLLM has not taken the weights of some layers; the others are loaded.
        RuntimeError: it has left some parameters as they were.
    """
    loadable = _loadable(model)
    if next(model.parameters()).device.type != "cpu" or config.quantization is not None:
        loaded = _load_layerwise(model, parts, config)
    elif _is_plain(model):
        loaded = _load_and_pack(model, parts, config.dtype, sums)
    else:
        loaded = _load_as_at_start(model, parts, config)
    if missed := loadable - loaded:
        raise RuntimeError(f"vLLM left these weights as they were: {sorted(missed)}")


def _loadable(model: torch.nn.Module) -> set[str]:
    """The names of the parameters that weights are loaded into.

    Others, such as the scales of a model that is quantised as it loads, are made when layers are processed.
    """
    made: set[str] = set()
    for prefix, module in model.named_modules():
        created = get_layerwise_info(module).restore_metadata[0].keys() | SKIP_TENSORS
        made |= {f"{prefix}.{name}".lstrip(".") for name in module._parameters.keys() - created}
    return {name for name, _ in model.named_parameters()} - made


def _is_processed(module: torch.nn.Module) -> bool:
    """Whether a layer (on the CPU) computes from more than its weights and a packed copy of them."""
    plain = {type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod}
    return (
        type(getattr(module, "quant_method", None)) not in plain
        or isinstance(module, MLAAttention)  # products of its weights
        or hasattr(module, "_cpu_unpacked_conv_weight")  # packed in place
    )


def _load(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Have one of vLLM's models load tensors; returns its names of the parameters that they went into."""
    return set(cast(Any, model).load_weights(tensors))


def _is_plain(model: torch.nn.Module) -> bool:
    return not any(map(_is_processed, model.modules()))


def _load_as_at_start(
    model: torch.nn.Module, parts: Iterable[dict[str, torch.Tensor]], config: ModelConfig
) -> set[str]:
    """Undo what processing has made of the parameters, load into them, and process them anew.

    vLLM's own reload is wrong on the CPU: it hands unpacked experts to kernels that expect packed ones,
    and loses what a model copies into its parameters without their loaders, as gpt-oss does.
    """
    for module in model.modules():
        for name, initial in get_layerwise_info(module).restore_metadata[0].items():
            current = getattr(module, name, None)
            if _is_processed(module) or current is None or current.shape != initial.shape:
                fresh = materialize_meta_tensor(initial).zero_()
                module.register_parameter(name, cast(Parameter, restore_layer_refs(fresh, module)))
        if isinstance(method := getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
            method.moe_kernel = None  # it packs experts when it is made, and only then
    loaded = {name for part in parts for name in _load(model, part.items())}
    process_weights_after_loading(model, config, torch.device("cpu"))
    pack_linear_weights(model.modules())
    return loaded


def _load_layerwise(
    model: torch.nn.Module, parts: Iterable[dict[str, torch.Tensor]], config: ModelConfig
) -> set[str]:
    """vLLM's own reload, which keeps the places in memory of what compiled graphs compute from."""
    addresses = {
        module: {parameter.data_ptr() for parameter in module.parameters(recurse=False)}
        for module in model.modules()
    }
    try:
        initialize_layerwise_reload(model)
        loaded = {name for part in parts for name in _load(model, part.items())}
        without = {m for m in addresses if (info := get_layerwise_info(m)).can_load() and not info.load_numel}
        # A head that is tied to the embeddings has their parameter, and gets no weights of its own.
        reached = set().union(*(addresses[module] for module in addresses.keys() - without))
        passed_by = {type(module).__name__ for module in without if addresses[module] - reached}
        finalize_layerwise_reload(model, config)
    except BaseException:
        _close_layers(model, config)
        raise
    pack_linear_weights(model.modules())
    if passed_by:
        raise Unfit(f"vLLM cannot update the weights of {', '.join(sorted(passed_by))} in a running server")
    return loaded


def _close_layers(model: torch.nn.Module, config: ModelConfig) -> None:
    """After a reload that broke off, give the layers that it left open the tensors back that they had.

    The next reload would otherwise count what an open layer has got already as its own, and process the layer
    before it has got all of its new weights.
    """
    for module in model.modules():
        if (info := get_layerwise_info(module)).can_load():
            info.load_numel = 0
            info.loaded_weights = []
    finalize_layerwise_reload(model, config)  # puts back the tensors of layers that have got none


CALLS = 2 * WORKERS
"""In how many layers that need not be compared are loaded: vLLM goes through the whole model in each."""


def _load_and_pack(
    model: torch.nn.Module,
    parts: Iterable[dict[str, torch.Tensor]],
    dtype: torch.dtype,
    sums: Mapping[str, int],
) -> set[str]:
    """Copy weights straight into the parameters, check them, and pack them.

    Layers are taken by several threads while this one goes on through the `parts`; none is in two of them.
    Returns vLLM's names of the parameters that were loaded.
    """
    parameters = dict(model.named_parameters())
    checks = checks_of(model)
    users = collections.defaultdict(list)  # several modules where weights are tied
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            users[id(module.weight)].append(module)

    compared: list[bool] = []

    def checksum_of(name: str, tensor: torch.Tensor) -> int:
        return sums[name] if name in sums and tensor.dtype == dtype else checksum(tensor.to(dtype))

    def load(tensors: list[tuple[str, torch.Tensor]], compares: bool) -> set[str]:
        with torch.no_grad():
            loaded = _load(model, tensors)
            if compares:
                came = {name: checksum_of(name, tensor) for name, tensor in tensors}
                # Looked up anew: of heads with a bias, vLLM's loader makes a parameter each time.
                compared.append(checks.check(came, {name: model.get_parameter(name) for name in loaded}))
            pack_linear_weights(module for name in loaded for module in users[id(parameters[name])])
        return loaded

    checks.begin_update()
    numbers = itertools.count()
    # oneDNN lays a packed copy out for the OpenMP threads of whoever makes it, and reads it by those of
    # whoever computes: if a new thread has another number of them, answers are wrong.
    set_threads = cast(Any, torch._C).set_num_threads  # vLLM has put a warning in the place of torch's own
    with ThreadPoolExecutor(WORKERS, initializer=set_threads, initargs=(torch.get_num_threads(),)) as workers:
        loads: list[Future[set[str]]] = []
        for part in parts:
            rest: list[list[tuple[str, torch.Tensor]]] = []
            for names in layerwise_groups(list(part)):
                layer = [(name, part[name]) for name in names]
                if checks.is_due(next(numbers)):
                    loads.append(workers.submit(load, layer, True))
                else:
                    rest.append(layer)
            for first in range(CALLS):
                if layers := rest[first::CALLS]:
                    loads.append(workers.submit(load, list(itertools.chain(*layers)), False))
        loaded = set().union(*(each.result() for each in loads))
    logger.info("%d of %d layers compared with what came", sum(compared), len(compared))
    return loaded


# Whether a model's parameters hold the tensors that came, by the checksums of both.
#
# vLLM's loaders stack tensors, pad them with zeros and reorder them by rows, all of which leaves the sum of
# their words as it is; some loaders compute. Which layers are of the first kind shows in the weights with
# which the server starts, however small the difference of later ones is. Of the others only the probe
# tells.
#
# Reading a whole model back takes about as long as a tenth of an update, so each update has its share of
# layers looked at; the first ones have all, since loaders that leave a layer out do so every time.


FIRST_UPDATES = 2
"""All layers are looked at in these; a run's first policy may be what the server started with."""
SHARES = 8
"""Then every layer is looked at in one of so many."""


class ParameterChecks:
    """What a model's tensors and parameters were at the server's start, by their names."""

    def __init__(self) -> None:
        self._updates = 0
        self._came: dict[str, int] = {}
        self._held: dict[str, int] = {}

    def watch(
        self, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Note the tensors that go into the model at its start, which computes in `dtype`."""
        for name, tensor in tensors:
            if tensor.is_floating_point():
                self._came[name] = checksum(tensor.to(dtype))
            yield name, tensor

    def note(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Note what has become of them."""
        self._held = {name: checksum(parameter) for name, parameter in parameters}

    def begin_update(self) -> None:
        """The model is about to get other weights."""
        self._updates += 1

    def is_due(self, layer: int) -> bool:
        """Whether this update has to check a layer, by its place among the layers."""
        return self._updates <= FIRST_UPDATES or (layer + self._updates) % SHARES == 0

    def check(self, came: Mapping[str, int], parameters: Mapping[str, torch.nn.Parameter]) -> bool:
        """Compare tensors that came, by their checksums, with the parameters that they were loaded into.

        Returns whether that could be done.

        Raises:
            NotHeld: they differ, in a layer in which they were the same at the start.
        """
        if not (came.keys() <= self._came.keys() and parameters.keys() <= self._held.keys()):
            return False
        if _total(self._came, came) != _total(self._held, parameters):
            return False
        if wrapped(came.values()) != wrapped(map(held_checksum, parameters.values())):
            raise NotHeld(f"checksums of {', '.join(sorted(parameters))} after loading")
        return True


def checks_of(model: torch.nn.Module) -> ParameterChecks:
    """What is known of a model; nothing if it was not loaded by Cairn's loader."""
    return _KNOWN.setdefault(model, ParameterChecks())


_KNOWN: "weakref.WeakKeyDictionary[torch.nn.Module, ParameterChecks]" = weakref.WeakKeyDictionary()


def _total(sums: Mapping[str, int], names: Iterable[str]) -> int:
    return wrapped(sums[name] for name in names)
