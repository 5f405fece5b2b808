"""vLLM plugin: weights from safetensors files, or from a trainer's memory.

Files are validated before any of the old weights is touched, mostly by the API process (`staging.py`).

Runs inside vLLM's processes only.
"""

import functools
import itertools
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader

from cairn.inference.plugin.loading import RepackableLoader, load_weights
from cairn.inference.plugin.policy_source import NotFinite, PolicyReader, Tensors
from cairn.inference.plugin.staging import Plan
from cairn.inference.plugin.vllm_internals import check_updatable
from cairn.inference.plugin.weight_files import UnusableWeights, identities
from cairn.policy.errors import NotHeld, NotThere, Unchanged
from cairn.run.processes import die_after
from cairn.run.signals import stay_deaf

logger = init_logger("vllm.cairn")

PLAN = TypeAdapter(Plan)


def register() -> None:
    """Entry point, called by vLLM in each of its processes."""
    stay_deaf()
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        die_after(parent.pid)  # an engine whose server and keeper were killed would stay, with its GPU
    WeightTransferEngineFactory.register_engine("filesystem", FilesystemEngine)
    register_model_loader("cairn")(RepackableLoader)


@dataclass
class FilesystemInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class FilesystemUpdateInfo(WeightTransferUpdateInfo):
    """`path`: a directory with model.safetensors, or shards and their index, or source.json, by which a
    trainer sends the tensors in its memory. Its files must not change once pushed. `plan`: what the API
    process has prepared and checked of it, if it has."""

    path: str
    plan: dict[str, Any] | None = None


class FilesystemEngine(WeightTransferEngine[FilesystemInitInfo, FilesystemUpdateInfo]):
    """Loads a Hugging Face directory's safetensors, or a trainer's tensors, into the running model.

    All the work is in `receive_weights`: vLLM closes the session if that raises, but not if `finish` does.
    """

    init_info_cls = FilesystemInitInfo
    update_info_cls = FilesystemUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        """As in the base class; vLLM calls it once the model is loaded.

        Raises:
            ValueError: the model's weights can't be updated, so the server must not start.
        """
        super().__init__(config, vllm_config, device, model)
        check_updatable(model, vllm_config)

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
        folder = identities(info.path)
        self.receive_weights(info)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        if identities(info.path) != folder:
            raise RuntimeError(f"{info.path} was removed or changed while its weights were loaded")

    def receive_weights(self, update_info: FilesystemUpdateInfo) -> None:
        """Load what was prepared; or else validate the files and load them, or load what the trainer sends.

        Raises:
            Refused: a file or tensor is unusable; the old weights are untouched.
            Altered: the tensors are not those that the trainer wrote; likewise.
            Gone, NotThere: the trainer does not send them; likewise.
            NotHeld: what came, or what the model holds now, is not what the trainer sent.
            RuntimeError: it has not sent all of them.
        """
        started = time.perf_counter()
        if update_info.plan is None:
            policy = self._reader.open(update_info.path)
            parts = map(self._reader.in_hub_layout, _begun(policy.parts))
            sums, values = policy.sums, policy.count
        else:
            plan = PLAN.validate_python(update_info.plan)
            weights = _prepared(update_info.path, plan)
            parts, sums = [weights], plan.sums
            values = sum(tensor.numel() for tensor in weights.values())
        checked = time.perf_counter()
        load_weights(self.model, parts, self.model_config, sums)
        logger.info(
            "%s: %.1f MB, %s in %.3f s, loaded in %.3f s",
            update_info.path,
            values * self.model_config.dtype.itemsize / 1e6,
            "checked" if update_info.plan is None else "mapped",
            checked - started,
            time.perf_counter() - checked,
        )

    @functools.cached_property
    def _reader(self) -> PolicyReader:
        return PolicyReader(self.model_config)


def _prepared(path: str, plan: Plan) -> Tensors:
    """The tensors that the API process has prepared from the folder `path`.

    Raises:
        Refused: they are not there any more.
    """
    if plan.folder and plan.folder != [list(file) for file in identities(path)]:
        raise UnusableWeights(f"{path} was removed or changed while its weights were read")
    try:
        return plan.weights()
    except (OSError, RuntimeError) as error:
        raise UnusableWeights(f"{path}: {error}") from None


def _begun(parts: Iterable[Tensors]) -> Iterator[Tensors]:
    """The same parts; the first has come, so that a source that does not work is found out at once.

    Raises:
        NotThere: it has not.
        Refused: it holds NaN or infinity.
    """
    rest = iter(parts)
    try:
        first = next(rest)
    except (NotHeld, Unchanged):
        raise
    except NotFinite as error:
        raise UnusableWeights(str(error)) from None
    except RuntimeError as error:
        raise NotThere(f"the trainer sends nothing: {error}") from None
    return itertools.chain([first], rest)
