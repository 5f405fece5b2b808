"""vLLM plugin: tells the experts that were chosen for each token, on CPUs.

vLLM does that itself (`--enable-return-routed-experts`), but with its second model runner alone, whose
kernels its CPU build does not have. Here, the choices lie beside the keys and values that they belong to,
under the same slots of the cache. So those of tokens whose keys and values are reused are there as well, and
what is computed again replaces them. The scheduler reads them where vLLM's own code asks for them, and all
that comes behind it is vLLM's.

Engine and worker share a process, as they do on CPUs. Runs inside that process only.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig

from cairn.inference.plugin.vllm_internals import (
    FullAttentionSpec,
    Request,
    Scheduler,
    bind_routed_experts_capturer,
    get_forward_context,
)
from cairn.inference.server import MODEL_REFUSED
from cairn.inference.vllm_command import EXPERTS_SCHEDULER
from cairn.policy.generation import expert_bytes


class ExpertsBySlot:
    """The experts of the tokens in the cache, uint8 or uint16 [slots, layers, experts of a token]."""

    def __init__(self, config: VllmConfig):
        """Prepare to note them; there is no cache yet."""
        model = config.model_config
        self._shape = model.get_total_num_hidden_layers(), model.get_num_experts_per_tok()
        self._dtype = torch.uint8 if expert_bytes(model.get_num_experts()) == 1 else torch.uint16
        self._rows = torch.zeros(0, *self._shape, dtype=self._dtype)

    def make_room(self, slots: int) -> None:
        """The cache has so many slots."""
        self._rows = torch.zeros(slots, *self._shape, dtype=self._dtype)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Note what a layer's router has chosen for the tokens of the present pass: integers [tokens, n]."""
        mappings = get_forward_context().slot_mapping
        if not len(self._rows) or not mappings:
            return  # while memory is measured
        assert isinstance(mappings, dict), "there is one batch at a time on a CPU"
        slots = next(iter(mappings.values()))[: len(topk_ids)]
        is_token = slots >= 0
        self._rows[slots[is_token], layer_id] = topk_ids[is_token].to(self._dtype)

    def read(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8 | np.uint16]:
        """Those of the tokens in these slots, [tokens, layers, n]."""
        return self._rows[torch.from_numpy(slots)].numpy()


_noted: ExpertsBySlot | None = None
"""Of the model in this process."""


def note_experts(model: torch.nn.Module, config: VllmConfig) -> None:
    """Note what the model's routers choose from now on, if the server is to tell it.

    Raises:
        ValueError: the model has no routers whose choice vLLM can show, which ends the server's start.
    """
    global _noted
    if config.scheduler_config.scheduler_cls != EXPERTS_SCHEDULER:
        return
    try:
        noted = ExpertsBySlot(config)
        bind_routed_experts_capturer(model, noted)  # pyright: ignore[reportArgumentType] # all it needs
    except ValueError as error:
        raise ValueError(
            f"{MODEL_REFUSED}it can't tell the experts of tokens (return_experts): {error}"
        ) from None
    _noted = noted


class ExpertsOfRequests:
    """What the scheduler asks about the experts of each request's tokens."""

    def __init__(self, scheduler: Scheduler, noted: ExpertsBySlot):
        """Read them where the scheduler's requests have their blocks of the cache."""
        self._scheduler = scheduler
        self._noted = noted
        self._told: dict[str, int] = {}
        """How many tokens of a request need not be told any more."""

    def build_connector_meta(self, scheduler_output: Any, requests: dict[str, Request]) -> None:
        """A pass is about to begin. What was told of a request that begins again is not told twice."""
        for name in scheduler_output.num_scheduled_tokens:
            request = requests[name]
            assert request.sampling_params is not None
            asked = min(request.sampling_params.routed_experts_prompt_start, request.num_prompt_tokens)
            before = request.num_tokens - 1 if request.num_output_tokens else 0
            self._told.setdefault(name, max(asked, before))

    def take_output(self, request: Request, output: None) -> npt.NDArray[np.uint8 | np.uint16] | None:
        """Of the tokens that were computed since the last call: all but the one that was just sampled."""
        start, end = self._told[request.request_id], request.num_tokens - 1
        if end < start:
            return None
        self._told[request.request_id] = end
        (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        size = self._scheduler.block_size
        places = np.arange(start, end)
        return self._noted.read(np.asarray(blocks, np.int64)[places // size] * size + places % size)

    def request_finished(self, request: Request) -> None:
        """It has ended, or gives up its blocks and begins again later."""
        self._told.pop(request.request_id, None)

    def reset(self) -> None:
        """The cache was emptied; no request is in it."""


class ExpertsScheduler(Scheduler):
    """vLLM's scheduler, which gives answers the experts of their tokens."""

    def __init__(self, *args: Any, **kwargs: Any):
        """Take the experts that are noted in this process.

        Raises:
            ValueError: not all layers keep all of a request's tokens in one cache, which ends the start.
        """
        super().__init__(*args, **kwargs)
        groups = self.kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
            raise ValueError(
                f"{MODEL_REFUSED}it can't tell the experts of tokens (return_experts) on a CPU: not all of "
                "its layers keep the keys and values of all tokens"
            )
        assert _noted is not None, "the model is loaded before"
        _noted.make_room(self.kv_cache_config.num_blocks * self.block_size)
        self.aux_output_connector = ExpertsOfRequests(self, _noted)
