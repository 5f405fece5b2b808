"""The models of clients: adapters of one base that is in memory once, each with its optimiser.

They are made of the trainer's parts: its loading and laying out of models, packing, losses, optimiser and
checkpoints. A model here knows nothing of clients or calls.
"""

import contextlib
import functools
import importlib.metadata
import math
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cairn.checkpoint.checksums import FileChecksum
from cairn.checkpoint.manifest import Manifest, new_manifest
from cairn.checkpoint.step_folder import TRAINER_STATE, StepFolder, TrainerRecord, verify
from cairn.checkpoint.store import CheckpointStore, write_files
from cairn.checkpoint.tensors.sharded_files import read_tensors, write_tensors
from cairn.config.service import ServiceConfig
from cairn.config.trainer import SFTConfig
from cairn.run.batches import TARGETS, Sample
from cairn.run.connections import free_port
from cairn.run.files import make_folders, sync
from cairn.run.seeds import derive
from cairn.service.helpers import PassHelpers
from cairn.service.losses import COLUMNS, ServedLoss, inputs_of, loss_of
from cairn.service.shares import PassShare, ShareAnswer
from cairn.service.wire import CallRefused, Datum, Pass, passed
from cairn.trainer.group import RankGroup
from cairn.trainer.models.adapter import Adapter, adapter_beside, make_adapter
from cairn.trainer.models.model import companions
from cairn.trainer.packing import MicroBatch, fill_rows, group_rows
from cairn.trainer.scoring.tokens import scoring
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState


@dataclass(frozen=True)
class AdamStep:
    """How one update is made; see the API's `AdamParams`. grad_clip_norm: 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "AdamStep":
        """Of a request's fields.

        Raises:
            CallRefused: one is unknown, or out of bounds.
        """
        if given.get("type", "adamw") not in ("adam", "adamw"):
            raise CallRefused(f"optimizer {given['type']!r}: this service has adamw")
        values = {name: value for name, value in given.items() if name != "type"}
        if unknown := values.keys() - cls.__dataclass_fields__.keys():
            raise CallRefused(
                f"adam_params: {min(unknown)} is no setting; there are {', '.join(cls.__dataclass_fields__)}"
            )
        for name, value in values.items():
            most = 1.0 if name.startswith("beta") else math.inf
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < most:
                raise CallRefused(f"adam_params: {name} = {value!r} is not a number from 0 to below {most}")
        return cls(**{name: float(value) for name, value in values.items()})


class ClientModel:
    """One adapter with its optimiser, and the gradients that have come since the last update."""

    def __init__(self, state: TrainerState, base: "AdapterBase", lora: Mapping[str, Any]):
        """Take a state whose adapter has its first values; `lora`: what it was made of."""
        self.state, self.lora = state, lora
        self._base = base
        self.values = object()
        """Another one whenever the weights are others."""
        self._samples, self._tokens = 0, 0
        """What the gradients that are there have come of."""

    @property
    def steps(self) -> int:
        """Updates so far."""
        return self.state.progress.step

    def compute(self, request: Pass, number: int) -> bytes:
        """The passes that a request asks for; gradients are added to those that are there.

        Args:
            number: of the call, from which dropout is drawn.

        Returns:
            The answer: logprobs of each sample's targets, and the sum of the loss.

        Raises:
            CallRefused: the request does not fit, and nothing was computed.
        """
        served, _ = loss_of(request)
        config, data, count = self.state.config, request.data, self._base.helpers.processes
        lengths = [len(self._sample(one, served, place).token_ids) for place, one in enumerate(data)]
        if not data:
            raise CallRefused("data: there is none")
        groups = group_rows(
            lengths,
            row_length=config.seq_len,
            rows_each=config.rows,
            tokens=config.micro_batch_tokens,
            arrange=self.state.scorer.rows.arrange,
            ranks=count,
        )
        dealt = [dict(list(enumerate(groups))[first::count]) for first in range(count)]
        how = (request.loss_fn, request.config, request.forward_only, number)
        shares = [
            PassShare(*how, {place: data[place] for group in own.values() for place in _flat(group)}, own)
            for own in dealt
        ]
        answers = self._base.helpers.compute(self, self._base.digest, shares)
        if not request.forward_only:
            self._samples += len(data)
            self._tokens += sum(lengths)
            for one in answers:
                self._add(one.gradients)
        losses = {index: loss for one in answers for index, loss in one.losses.items()}
        total = np.cumsum([losses[index] for index in range(len(groups))], dtype=np.float64)[-1]
        logprobs = {place: values for one in answers for place, values in one.logprobs.items()}
        return passed([logprobs[place] for place in range(len(data))], {"loss:sum": float(total)})

    def compute_share(self, share: PassShare) -> ShareAnswer:
        """Compute micro-batches of a pass; the gradients that are there stay as they are."""
        if not share.groups:
            return ShareAnswer({}, {}, {})
        state, config = self.state, self.state.config
        served, loss = loss_of(Pass("", None, [], share.loss_fn, share.config))
        samples = {place: self._sample(one, served, place) for place, one in share.data.items()}
        columns = sorted(next(iter(samples.values())).columns)
        micros = [
            fill_rows([[samples[i] for i in row] for row in group], index, columns)
            for index, group in share.groups.items()
        ]
        found: dict[int, torch.Tensor] = {}

        def forward(micro: MicroBatch) -> torch.Tensor:
            state.group.seed(derive(config.seed, "dropout", share.number, micro.index))
            return state.scorer.logprobs(micro, 1.0)

        def sums(micro: MicroBatch, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            places = _flat(share.groups[micro.index])
            for place, values in zip(places, _by_sample(micro, logprobs), strict=True):
                found[place] = values.detach()
            total = loss(inputs_of(micro, logprobs)).loss
            return total, total.detach()

        gradients: dict[str, torch.Tensor] = {}
        if share.forward_only:
            with scoring(state.scorer):
                losses = [sums(m, forward(m))[1] for m in (micro.to(state.group.device) for micro in micros)]
        else:
            trained = state.policy.trained()
            before = {name: one.grad for name, one in trained.items()}
            state.policy.optimizer.zero_grad(set_to_none=True)
            try:
                losses = state.backend.forward_backward(state.policy, micros, forward, sums)
                gradients = {name: one.grad.cpu() for name, one in trained.items() if one.grad is not None}
            finally:
                for name, one in trained.items():
                    one.grad = before[name]
        sums_of = {micro.index: loss.item() for micro, loss in zip(micros, losses, strict=True)}
        return ShareAnswer({place: one.cpu().numpy() for place, one in found.items()}, sums_of, gradients)

    def _add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add gradients to those that are there."""
        trained = self.state.policy.trained()
        for name, one in gradients.items():
            there, new = trained[name].grad, one.to(trained[name].device)
            trained[name].grad = new if there is None else there + new

    def weights(self) -> dict[str, torch.Tensor]:
        """Those of the adapter, on the CPU."""
        return {name: one.detach().cpu() for name, one in self.state.policy.trained().items()}

    @torch.no_grad()
    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Have the adapter's weights be what `weights` of another process has given."""
        for name, one in self.state.policy.trained().items():
            one.copy_(weights[name])

    def _sample(self, datum: Datum, served: ServedLoss, place: int) -> Sample:
        """The tokens of a datum and its last target, with what the loss needs of each of them.

        Raises:
            CallRefused: it lacks something, or is too long.
        """
        where, count = f"data[{place}]", len(datum.tokens)
        size = self.state.policy.module.config.get_text_config().vocab_size
        targets = datum.inputs.get("target_tokens")
        if targets is None or len(targets) != count:
            what = "is missing" if targets is None else f"has {len(targets)} values"
            raise CallRefused(
                f"{where}: target_tokens {what}, and model_input has {count} tokens; one for each is needed"
            )
        if count + 1 > self.state.config.seq_len:
            raise CallRefused(
                f"{where}: {count} tokens and the last target are more than the {self.state.config.seq_len} "
                "that this service takes (seq_len)"
            )
        for name, ids in (("model_input", datum.tokens), ("target_tokens", targets)):
            if (bad := ids[(ids < 0) | (ids >= size)]).size:
                raise CallRefused(
                    f"{where}: {name} has the token {bad[0]}, and the model has tokens 0 to {size - 1}"
                )
        columns: dict[str, Any] = {TARGETS: _shifted(targets, np.int32)}
        for name, optional in served.inputs.items():
            values = datum.inputs.get(name)
            if values is None and optional:
                values = np.ones(count, np.float32)
            if values is None or len(values) != count:
                what = "is missing" if values is None else f"has {len(values)} values"
                raise CallRefused(
                    f"{where}: {name} {what}, and model_input has {count} tokens; one for each is needed"
                )
            if not np.isfinite(values).all():
                raise CallRefused(f"{where}: {name} holds NaN or infinity")
            columns[COLUMNS.get(name, name)] = _shifted(values, np.float32)
        token_ids = np.append(datum.tokens, targets[-1]).astype(np.int32)
        return Sample(token_ids, np.ones(count + 1, np.bool_), columns)

    def update(self, how: AdamStep) -> dict[str, float]:
        """Change the weights by the gradients, which are gone then; returns metrics.

        Raises:
            CallRefused: the gradient is not finite: the weights stay, and the gradients are gone.
        """
        state = self.state
        optimizer = state.policy.optimizer
        norm = state.backend.norm_and_clip(state.policy, how.grad_clip_norm or math.inf).item()
        if not math.isfinite(norm):
            self.drop_gradients()
            raise CallRefused(
                f"the gradient's norm is {norm}: the weights stay as they were, and the gradients are dropped"
            )
        for group in optimizer.param_groups:
            group |= {"betas": (how.beta1, how.beta2), "eps": how.eps, "weight_decay": how.weight_decay}
        state.backend.step(state.policy, how.learning_rate)
        self.values = object()
        state.progress.step += 1
        state.progress.total_samples += self._samples
        state.progress.total_tokens += self._tokens
        self.drop_gradients()
        return {"grad_norm:mean": norm, "step:max": state.progress.step}

    def drop_gradients(self) -> None:
        """Forget the gradients that have come since the last update."""
        self.state.policy.optimizer.zero_grad(set_to_none=True)
        self._samples, self._tokens = 0, 0

    # Checkpoints

    def nbytes(self, *, training: bool) -> int:
        """Bytes of the tensors that `write` writes."""
        return sum(
            t.numel() * t.element_size() for named in self._tensors(training).values() for t in named.values()
        )

    def _tensors(self, training: bool) -> Mapping[str, Mapping[str, Any]]:
        return self.state.tensors(weights_only=not training)

    def write(
        self, store: CheckpointStore, step: int, position: Mapping[str, Any], *, training: bool
    ) -> Path:
        """Commit what there is as step `step` of `store`; returns its folder.

        Args:
            position: what is to be known of it to go on: see `position_of`.
            training: whether the optimiser's state is part of it; without it, it is for servers.

        Raises:
            CheckpointError: the step exists already.
            OSError: a file can't be written.
        """
        state, policy = self.state, self.state.policy
        beside = {**companions(policy.module, self._base.folder), **policy.beside()}
        files = {f"model/{name}": content for name, content in beside.items()}
        if training:
            record = TrainerRecord(
                progress=asdict(state.progress),
                seed=state.config.seed,
                rows=state.scorer.rows.name,
                optimizer=type(policy.optimizer).__name__,
                position=dict(position),
            )
            files[TRAINER_STATE] = record.to_json()

        def fill(folder: Path) -> Manifest:
            dtypes: dict[str, str] = {}
            for stem, named in self._tensors(training).items():
                where, _, short = stem.rpartition("/")
                make_folders(folder / where)
                write_tensors(folder / where, named, short)
                dtypes[stem] = "F32"
            written = {
                path.relative_to(folder).as_posix(): _durable(path) for path in sorted(folder.rglob("*.*"))
            }
            about = _about(state.progress.step, dtypes, ["trainer"] if training else ["model"])
            return new_manifest(step, written | write_files(folder, files), about)

        return store.make(step, fill)

    def read(self, folder: Path, *, training: bool = True) -> dict[str, Any]:
        """Take everything from a step; returns the position that it was written with.

        Args:
            training: False takes the weights alone, and begins with a fresh optimiser.

        Raises:
            CheckpointError: it has an adapter of another shape, or no training state.
            Damaged: a file is not as it was written.
        """
        self.drop_gradients()
        self.values = object()
        self.state.policy.optimizer.state.clear()
        if training:
            self.state.load(folder)
            return self.state.position or {}
        verify(folder)
        read_tensors(StepFolder(folder).model, self.state.policy.saved(), "adapter_model")
        self.state.progress = TrainerProgress()
        return {}


class AdapterBase:
    """The base in memory, proven to compute rightly, and what makes adapters of it."""

    def __init__(self, config: ServiceConfig, folder: Path, group: RankGroup, helpers: PassHelpers):
        """Read the base in `folder`.

        Args:
            helpers: what computes shares of passes beside this process.

        Raises:
            UsageError: the model can't be trained rightly.
            CheckpointError, Damaged: its files are not in order.
        """
        self._config, self._group = config, group
        self.folder, self.helpers = folder, helpers
        lora = {"rank": 1, "seed": config.seed}
        settings = self._settings(lora)
        first = make_adapter(folder, settings, group)
        first.begin(folder)
        self._first = first
        self.plain = self._checked(first, settings, lora)
        """An adapter of zeros, with which servers compute what the base does."""

    @functools.cached_property
    def digest(self) -> str:
        """Names the base by its files."""
        record = self._first.base
        return ";".join(f"{name}:{entry.model_dump_json()}" for name, entry in sorted(record.files.items()))

    def make(self, lora: Mapping[str, Any]) -> ClientModel:
        """A model with an adapter's first values.

        Args:
            lora: its `rank` and `seed`, and with `train_attn` or `train_mlp` False what it leaves out.

        Raises:
            CallRefused: nothing would be trained.
        """
        settings = self._settings(lora)
        adapter = adapter_beside(self._first, self.folder, settings, self._group)
        adapter.draw()
        return self._checked(adapter, settings, lora)

    def _checked(self, adapter: Adapter, settings: SFTConfig, lora: Mapping[str, Any]) -> ClientModel:
        state = TrainerState(settings, self._group, {POLICY: adapter}, TrainerProgress())
        state.check_model()
        return ClientModel(state, self, lora)

    def _settings(self, lora: Mapping[str, Any]) -> SFTConfig:
        config = self._config
        targets = ["all-linear"]
        if not (lora.get("train_attn", True) and lora.get("train_mlp", True)):
            kept = [
                name
                for name in self._first.layers
                if _is_attention(name) == bool(lora.get("train_attn", True))
            ]
            targets = kept if lora.get("train_attn", True) or lora.get("train_mlp", True) else []
            if not targets:
                raise CallRefused(
                    "lora_config: with train_attn and train_mlp off nothing is trained in this model"
                )
        return SFTConfig.model_validate(
            {
                "model": {"name": str(self.folder)},
                "seed": lora["seed"],
                "seq_len": config.seq_len,
                "micro_batch_tokens": config.micro_batch_tokens,
                "precision": {"compute": "float32"},
                "lora": {"rank": lora["rank"], "alpha": config.lora_alpha, "targets": targets},
            }
        )


@contextlib.contextmanager
def one_rank(config: ServiceConfig, device: int = 0) -> Generator[RankGroup]:
    """This process as the one rank of a group, with the GPU of this number if there are any."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if sys.platform == "linux":
        place["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ |= {**place, "LOCAL_RANK": str(device)}
    group = RankGroup.join(threads=config.threads, deterministic=True)
    try:
        yield group
    finally:
        group.leave()


def _is_attention(name: str) -> bool:
    return "attn" in name or "attention" in name


def _shifted(values: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """Values of N targets as those of N + 1 tokens, of which nothing predicts the first."""
    return np.concatenate([np.zeros(1, dtype), values.astype(dtype)])


def _flat(group: Sequence[Sequence[int]]) -> list[int]:
    return [place for row in group for place in row]


def _by_sample(micro: MicroBatch, logprobs: torch.Tensor) -> list[torch.Tensor]:
    """Those of each sample's targets, float32 [N], of the logprobs of tokens 1 to T - 1 of the rows."""
    flat = torch.nn.functional.pad(logprobs, (1, 0)).flatten()
    bounds = micro.bounds.tolist()
    return [flat[bounds[number] + 1 : bounds[number + 1]] for number in micro.units.flatten().tolist()]


def _durable(path: Path) -> FileChecksum:
    """Make a file durable; returns its checksum."""
    checksum = FileChecksum.read(path)
    sync(path)
    return checksum


def _about(step: int, dtypes: Mapping[str, str], parts: list[str]) -> dict[str, Any]:
    """The fields of a manifest that say what a step is of."""
    return {
        **{"run_id": "service", "attempt": 0, "branch": "branch_1", "parent": None, "world_size": 1},
        **{"parts": parts, "dtypes": dict(dtypes), "metrics": {"optimizer_step": step}, "config_digest": ""},
        "versions": {"cairn": importlib.metadata.version("cairn")},
    }
