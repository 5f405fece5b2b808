"""vLLM plugin: policies that are adapters, which vLLM computes beside the model's weights, unmerged.

vLLM reads an adapter again, by its path, whenever it has put it out of its memory and a request needs it.
The trainer writes over its folders meanwhile, and a resumed run uses the same paths once more. So every
policy that comes is checked and copied into a folder of its own, which never changes. vLLM loads each by
its own means, under a name and a path of its own, and never in place of another. So requests in flight end
under the adapter that they began with, generation goes on meanwhile, and the prefix cache, which vLLM keys
by an adapter's name and path, never mixes two policies.

Runs inside vLLM's API process only.
"""

import asyncio
import json
import secrets
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.logger import init_logger

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import ADAPTER_CONFIG
from cairn.checkpoint.tensors.layout import find_tensors
from cairn.checkpoint.tensors.sharded_files import read_tensor
from cairn.inference.plugin.middleware import OpenRequests
from cairn.inference.plugin.updates import NotTaken, PolicyUpdate, Updates, WeightUpdate
from cairn.inference.plugin.weight_files import UnusableWeights, identities, look_at
from cairn.inference.vllm_command import make_copies_folder
from cairn.model.adapters import PREFIX, Base, base_of_adapter, is_adapter
from cairn.model.peft_settings import adapter_settings
from cairn.policy.checksums import read_checksums
from cairn.policy.errors import Altered, Unchanged
from cairn.run.files import DamagedFile

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

MERGED = 'lora.serve = "merged" serves any adapter'


@dataclass(frozen=True)
class AdapterCopy:
    """A copy of an adapter. modules: the names of the layers that it has a pair of matrices for."""

    folder: Path
    modules: frozenset[str]


class AdapterCopies:
    """Checks and copies adapters.

    Args:
        model: what the server was started with; the adapters must be of it.
        dtype: in which the server computes.
        max_rank: the largest rank that it was started for.
        folder: where to put the copies: one that is not there yet (see `copies_folder`).
    """

    def __init__(self, model: str, dtype: torch.dtype, max_rank: int, folder: Path):
        self._model = model
        self._dtype = dtype
        self._max_rank = max_rank
        self._began_with = identities(model)
        self._known: Base | None = None
        self._count = 0
        self._folder = make_copies_folder(folder)

    def add(self, path: str) -> AdapterCopy:
        """Check the adapter in the folder `path`, and copy it.

        Raises:
            Altered: it is not the one that the trainer wrote.
            Refused: it is no adapter of the server's model, or one that vLLM can't compute with.
        """
        folder = Path(path)
        if not is_adapter(folder):
            raise UnusableWeights(
                f"{path} holds no adapter, and this server computes adapters beside the model that it was "
                "started with (--max-lora-rank); start it without that setting, and it takes any weights"
            )
        try:
            tensors = self._tensors(folder)
            self._check_base(folder)
        except (OSError, DamagedFile, Damaged, CheckpointError) as error:
            raise UnusableWeights(str(error)) from None
        self._count += 1
        copy = self._folder / str(self._count)
        copy.mkdir()
        try:
            save_file(tensors, copy / "adapter_model.safetensors", {"format": "pt"})
            shutil.copyfile(folder / ADAPTER_CONFIG, copy / ADAPTER_CONFIG)
        except OSError as error:
            shutil.rmtree(copy, ignore_errors=True)
            raise UnusableWeights(f"{path} can't be copied to {copy}: {error.strerror}") from None
        return AdapterCopy(
            copy, frozenset(name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors)
        )

    def remove(self, copy: AdapterCopy) -> None:
        """Delete a copy that no request needs any more."""
        shutil.rmtree(copy.folder, ignore_errors=True)

    def _tensors(self, folder: Path) -> dict[str, torch.Tensor]:
        """The adapter's matrices, as the trainer wrote them."""
        about = adapter_settings(folder)
        published = read_checksums(folder) or {}
        tensors = {name: read_tensor(one) for name, one in find_tensors(folder, "adapter_model").items()}
        for name in tensors.keys() | published.keys():
            look = look_at(tensors[name], self._dtype) if name in tensors else None
            if name in published and (look is None or look.checksum != published[name]):
                raise Altered(
                    f"{folder}: tensor {name} is not the one that the trainer wrote (other checksum)"
                )
            if look is not None and not look.is_finite:
                raise UnusableWeights(f"{folder}: tensor {name} holds NaN or infinity (as {self._dtype})")
        whole = sorted(n for n in tensors if not n.endswith((".lora_A.weight", ".lora_B.weight")))
        if whole or about.get("modules_to_save"):
            what = f"{whole[0]}, which is" if whole else f"modules_to_save = {about['modules_to_save']}, "
            raise UnusableWeights(
                f"{folder} has {what} trained in full, and vLLM computes only pairs; {MERGED}"
            )
        for name in tensors:
            other = name.replace(".lora_A.", ".lora_B.")
            if other not in tensors or name.replace(".lora_B.", ".lora_A.") not in tensors:
                raise UnusableWeights(f"{folder}: {name} has no counterpart")
        rank = max((one.shape[0] for name, one in tensors.items() if ".lora_A." in name), default=0)
        if not rank or rank != about.get("r"):
            raise UnusableWeights(
                f"{folder}: matrices of rank {rank}, and {ADAPTER_CONFIG} has r = {about.get('r')}"
            )
        if rank > self._max_rank:
            raise UnusableWeights(
                f"{folder}: the adapter has rank {rank}, and the server was started with --max-lora-rank "
                f"{self._max_rank}"
            )
        return tensors

    def _check_base(self, folder: Path) -> None:
        """Check that the adapter is one of the server's model, and has the scale that its run began with."""
        record = base_of_adapter(folder)
        if record is None:
            raise UnusableWeights(f"{folder}: does not say which base its adapter is of")
        about = json.loads((folder / ADAPTER_CONFIG).read_text())
        shape = {"rank": about["r"], "alpha": about["lora_alpha"], "rslora": about.get("use_rslora", False)}
        for key, value in shape.items():
            if record.lora.get(key, value) != value:
                raise UnusableWeights(
                    f"{folder}: {ADAPTER_CONFIG} has {key} {value}, its run {record.lora[key]}"
                )
        found = identities(self._model)
        if found != self._began_with:
            raise UnusableWeights(
                f"{self._model} was changed since the server was started with it; start it anew"
            )
        if record == self._known:
            return
        try:
            record.find(folder, self._model)
            record.check_files(Path(self._model), folder)
        except CheckpointError as error:
            raise UnusableWeights(
                f"{error}; this server computes adapters beside the model that it was started with: start it "
                "with the base, inference --model.name BASE"
            ) from None
        self._known = record


# The policies that requests may name.


logger = init_logger("vllm.cairn")


@dataclass(frozen=True)
class Loaded:
    """A policy that requests may name. number: vLLM's own of it."""

    version: str
    name: str
    number: int
    copy: AdapterCopy


def too_many(loaded: Sequence[Loaded], kept: int, most: int) -> list[Loaded]:
    """Which policies no request may name any more, once the last one of `loaded` has come.

    Of its run, those before the newest `kept`. Those of other runs stay, as these may be sampling from them;
    but of all together the oldest go beyond `most`, or beyond `kept` if that is more.
    """
    whose = run_of(loaded[-1].version)
    own = [one for one in loaded if run_of(one.version) == whose]
    found = own[: max(len(own) - kept, 0)]
    left = [one for one in loaded if one not in found]
    return found + left[: max(len(left) - max(kept, most), 0)]


def run_of(version: str) -> str:
    """The run whose policy it is; of another name, all but the last number."""
    return version.rpartition(":")[0]


class Unmerged(Updates):
    """Has vLLM load each policy as an adapter, and drops those that no request uses any more."""

    def __init__(
        self, engine: "AsyncLLM", models: OpenAIServingModels, requests: OpenRequests, copies: AdapterCopies
    ):
        self._engine = engine
        self._models = models
        self._requests = requests
        self._copies = copies
        lora = engine.vllm_config.lora_config
        self._most = 0 if lora is None else lora.max_loras
        """Policies, of whichever runs, that one batch may hold answers of."""
        self._loaded: list[Loaded] = []
        self._dropping: set[asyncio.Task[None]] = set()

    async def version(self) -> str:
        own = await self._engine.get_weight_version()  # which shows that the engine is alive
        return self._loaded[-1].version if self._loaded else own

    @property
    def adapter(self) -> str | None:
        return self._loaded[-1].name if self._loaded else None

    @property
    def must_name(self) -> Collection[str] | None:
        on_cpu = self._engine.vllm_config.device_config.device_type == "cpu"
        return [loaded.name for loaded in self._loaded] if on_cpu and self._loaded else None

    async def take(self, update: WeightUpdate, noted: PolicyUpdate) -> str:
        """See `Updates`. Requests in flight go on under the adapter that they began with."""
        try:
            copy = await asyncio.to_thread(self._copies.add, update.path)
        except Unchanged as error:
            raise NotTaken.because(error) from None
        except Exception as error:
            logger.exception("cannot prepare %s", update.path)
            raise NotTaken(422, f"{update.path}: {error!r}") from None
        try:
            number, name = await self._load(f"{update.version}@{secrets.token_hex(4)}", update.path, copy)
        except BaseException:
            self._copies.remove(copy)
            raise
        self._loaded.append(Loaded(update.version, name, number, copy))
        for old in too_many(self._loaded, update.kept, self._most):
            self._loaded.remove(old)
            await self._forget(old)
        return update.version

    async def _load(self, name: str, path: str, copy: AdapterCopy) -> tuple[int, str]:
        """Have vLLM load a copy; returns its number and the name.

        Raises:
            NotTaken: it refuses, or does not compute with all of it.
        """
        request = LoadLoRAAdapterRequest(lora_name=name, lora_path=str(copy.folder))
        answer = await self._models.load_lora_adapter(request)
        if isinstance(answer, ErrorResponse):
            reason = answer.error.message
            if self._engine.errored:
                raise NotTaken(500, f"the engine failed while it loaded the adapter: {reason}")
            raise NotTaken(422, f"{path}: vLLM can't compute with this adapter: {reason}; {MERGED}")
        number = self._models.lora_requests[name].lora_int_id
        by_worker = await self._engine.collective_rpc("cairn_adapter_parts", args=(number,))
        parts = {part for parts in by_worker for part in parts}
        if len(parts) != len(copy.modules):
            await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))
            await self._engine.remove_lora(number)
            raise NotTaken(
                422,
                f"{path}: vLLM computes with {len(parts)} of the {len(copy.modules)} pairs of matrices of "
                f"this adapter, of layers such as {max(copy.modules)}, and leaves out the others; {MERGED}",
            )
        return number, name

    async def _forget(self, old: Loaded) -> None:
        """Let no new request name a policy, and drop it when those have ended that may have named it."""
        await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=old.name))
        dropping = asyncio.create_task(self._drop(old))
        self._dropping.add(dropping)
        dropping.add_done_callback(self._dropping.discard)

    async def _drop(self, old: Loaded) -> None:
        await self._requests.ended()
        try:
            await self._engine.remove_lora(old.number)
        finally:
            self._copies.remove(old.copy)
        logger.info("dropped adapter %s", old.name)
