"""vLLM plugin: weights from safetensors files, or from a trainer's memory.

Files are validated before any of the old weights is touched.

Runs inside vLLM's processes only.
"""

import copy
import functools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    layerwise_groups,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader

from cairn.inference.plugin.expected import ExpectedTensors
from cairn.inference.plugin.loading import RepackableLoader, load_weights
from cairn.inference.plugin.weight_files import Refused, check_folder, identities, look_at, read_weights
from cairn.policy.receiver import WeightReceiver
from cairn.policy.refusals import NotHeld, Unchanged
from cairn.policy.source import Source, read_source
from cairn.run.files import DamagedFile
from cairn.run.signals import stay_deaf

logger = init_logger("vllm.cairn")


def register() -> None:
    """Entry point, called by vLLM in each of its processes."""
    stay_deaf()
    WeightTransferEngineFactory.register_engine("filesystem", FilesystemEngine)
    register_model_loader("cairn")(RepackableLoader)


@dataclass
class FilesystemInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class FilesystemUpdateInfo(WeightTransferUpdateInfo):
    """`path`: a directory with model.safetensors, or shards and their index, or source.json, by which a
    trainer offers the tensors in its memory. Its files must not change once pushed."""

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
        check_folder(info.path)
        files = identities(info.path)
        self.receive_weights(info)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        if identities(info.path) != files:
            raise RuntimeError(f"{info.path} was removed or changed while its weights were loaded")

    def receive_weights(self, update_info: FilesystemUpdateInfo) -> None:
        """Validate the files, then load them; or load what the trainer sends, layer by layer.

        Raises:
            Refused: a file or tensor is unusable; the old weights are untouched.
            Altered: the tensors are not those that the trainer wrote; likewise.
            Gone, NotThere: the trainer does not send them; likewise.
            NotHeld: what came, or what the model holds now, is not what the trainer sent.
            RuntimeError: it has not sent all of them.
        """
        started = time.perf_counter()
        try:
            parts, sums, items = self._offered(update_info.path)
        except Unchanged:
            raise
        except Exception as error:  # nothing has been touched, whatever it was
            logger.exception("cannot read %s", update_info.path)
            raise Refused(f"{update_info.path}: {error!r}") from None
        checked = time.perf_counter()
        loaded = load_weights(self.model, map(self._in_hub_layout, parts), self.model_config, sums)
        if missed := {name for name, _ in self.model.named_parameters()} - loaded:
            raise RuntimeError(f"vLLM left these weights as they were: {sorted(missed)}")
        logger.info(
            "%s: %.1f MB, checked in %.3f s, loaded in %.3f s",
            update_info.path,
            items * self.model_config.dtype.itemsize / 1e6,
            checked - started,
            time.perf_counter() - checked,
        )

    def _offered(self, path: str) -> tuple[Iterable[dict[str, torch.Tensor]], Mapping[str, int], int]:
        """The tensors of a folder, checked, or those that its trainer is about to send; their checksums,
        which are filled in as tensors arrive; and the number of values in all."""
        try:
            source = read_source(Path(path))
        except (DamagedFile, ValueError, OSError, RecursionError) as error:
            raise Refused(f"{path}: does not say where its tensors are: {error}") from None
        if source is not None:
            sums: dict[str, int] = {}
            return self._from_trainer(source, sums), sums, sum(map(math.prod, source.shapes.values()))
        arrived = read_weights(path, self._expected.layout_of, self.model_config.dtype)
        return [arrived.weights], arrived.sums, sum(tensor.numel() for tensor in arrived.weights.values())

    def _from_trainer(self, source: Source, sums: dict[str, int]) -> Iterator[dict[str, torch.Tensor]]:
        """The trainer's tensors, a layer at a time; their checksums go into `sums`.

        Raises:
            Refused: it has other tensors than this model.
            Gone, NotThere: it does not send them.
            NotHeld: while iterating: they are not those that it sent.
            RuntimeError: while iterating: it broke off, or a value is not finite.
        """
        if source.device != self.device.type:
            raise Refused(
                f"the trainer has them on {source.device} and this server computes on {self.device.type}: "
                "set --trainer.weight-transport to files"
            )
        layout = self._expected.layout_of(source.shapes)
        shapes, tied = layout.shapes, layout.tied
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
                    look = look_at(tensor, tensor.dtype)
                    if not look.is_finite:
                        raise RuntimeError(f"the trainer's tensor {name} holds NaN or infinity")
                    sums[name] = look.checksum
                yield weights
            for name, sent in self._receiver.sent.items():
                if sums[name] != sent:
                    raise NotHeld(f"checksum of {name} as it came from the trainer")

        return checked()

    @functools.cached_property
    def _receiver(self) -> WeightReceiver:
        return WeightReceiver(self.device)

    def _in_hub_layout(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of whole layers as vLLM takes them."""
        if weights.keys() <= self._expected.hub.shapes.keys():
            return weights
        return self._expected.to_hub(weights)

    @functools.cached_property
    def _expected(self) -> ExpectedTensors:
        config = self.model_config.hf_config
        if self.model_config.word_embeddings_untied_by_checkpoint:  # until it had compared them
            config = copy.deepcopy(config)
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = True
        return ExpectedTensors(config)
