"""The systems that benchmarks/checkpoint.py compares, behind the same five methods."""

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_state import Training
from torch.distributed.tensor import DTensor

from cairn.run.files import sync


class CairnSystem:
    """Saves and loads like Cairn's trainer."""

    def __init__(self, name: str, training: Training, root: Path):
        from cairn.checkpoint.saving.saver import Saver, SavingRank
        from cairn.checkpoint.store import CheckpointStore

        self.training = training
        self.rank = dist.get_rank()
        self.store = CheckpointStore(root)
        self.saver = Saver(
            self.store,
            SavingRank(self.rank, dist.get_world_size(), "benchmark"),
            after_commit=lambda step: self.store.delete(step - 1) if step > 1 else None,
        )
        self.before_update = self.saver.before_update
        self.about = {
            **{"run_id": "benchmark", "attempt": 1, "branch": "main", "parent": None, "parts": ["trainer"]},
            **{"world_size": dist.get_world_size(), "dtypes": {}, "metrics": {}, "versions": {}},
            "config_digest": "",
        }

    def save(self, number: int) -> None:
        self.step = number
        self.saver.save(number, self.training.tensors(), {"trainer/state.json": b"{}"}, self.about)

    def durable_seconds(self) -> float | None:
        saved = self.saver.check()
        return saved[0].durable_seconds if saved else None

    def load(self) -> None:
        from cairn.checkpoint.tensors.sharded_files import load_step

        def gather(mine):
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, mine)
            return gathered

        self.saver.finish()
        load_step(self.store.folder(self.step), self.training.tensors(), rank=self.rank, gather=gather)

    def close(self) -> None:
        self.saver.finish()
        self.saver.close()


class DcpSystem:
    """torch.distributed.checkpoint: `save`, or `async_save` with a thread or a process."""

    def __init__(self, name: str, training: Training, root: Path):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.dcp = dcp
        self.training = training
        self.root = root
        self.future = None
        self.kind = {
            "dcp_thread": AsyncCheckpointerType.THREAD,
            "dcp_process": AsyncCheckpointerType.PROCESS,
        }.get(name)
        self.group = dist.new_group(backend="gloo") if self.kind else None

    def save(self, number: int) -> None:
        self.path = self.root / f"step_{number}"
        self.began = time.perf_counter()
        if self.kind is None:
            self.dcp.save(self.training.flat(), checkpoint_id=self.path)
            self.ended = time.perf_counter()
            return
        self.ended = None
        self.future = self.dcp.async_save(
            self.training.flat(),
            checkpoint_id=self.path,
            process_group=self.group,
            async_checkpointer_type=self.kind,
        )
        future = getattr(self.future, "upload_completion", self.future)
        future.add_done_callback(lambda _: setattr(self, "ended", time.perf_counter()))

    def before_update(self) -> None:
        pass

    def durable_seconds(self) -> float | None:
        return self.ended - self.began if self.ended else None

    def load(self) -> None:
        self.dcp.load(self.training.flat(), checkpoint_id=self.path)

    def close(self) -> None:
        pass


class MetaSystem:
    """Meta's torch_checkpointing, saving asynchronously, if it is installed (group `bench`).

    Its direct writes fail here with EINVAL, so they are turned off. It does not fsync, so that is done for
    it.
    """

    def __init__(self, name: str, training: Training, root: Path):
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        items = {"state": ItemSpec(resharder=DefaultResharder())}
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager(CheckpointManager.Config(items=items, storage_config=storage))
        self.training = training
        self.root = root

    def save(self, number: int) -> None:
        self.path = str(self.root / f"step_{number}")
        self.began = time.perf_counter()
        self.ended = None
        self.future = self.manager.save(self.path, {"state": self.training.flat()})
        threading.Thread(target=self._make_durable, daemon=True).start()

    def _make_durable(self) -> None:
        self.future.result()
        for path in Path(self.path).rglob("*"):
            sync(path)
        self.ended = time.perf_counter()

    def before_update(self) -> None:
        with self.manager.lock():
            pass

    def durable_seconds(self) -> float | None:
        return self.ended - self.began if self.ended else None

    def load(self) -> None:
        self.manager.load(self.path, into={"state": self.training.flat()})

    def close(self) -> None:
        self.manager.close()


class WholeFileSystem:
    """`torch.save` and `safetensors.save_file` of each rank's state, fsynced."""

    def __init__(self, name: str, training: Training, root: Path):
        self.name = name
        self.training = training
        self.root = root
        self.path = root / f"rank{dist.get_rank()}"

    def _local(self) -> dict:
        flat = self.training.flat()
        return {k: (t.to_local() if isinstance(t, DTensor) else t).detach() for k, t in flat.items()}

    def save(self, number: int) -> None:
        from safetensors.torch import save_file

        self.began = time.perf_counter()
        state = self._local()
        if self.name == "torch_save":
            torch.save(state, self.path)
        else:
            save_file(state, self.path)
        sync(self.path)
        self.ended = time.perf_counter()

    def before_update(self) -> None:
        pass

    def durable_seconds(self) -> float | None:
        return self.ended - self.began

    def load(self) -> None:
        from safetensors.torch import load_file

        if self.name == "torch_save":
            loaded = torch.load(self.path, weights_only=True, mmap=True)
        else:
            loaded = load_file(self.path)
        for name, tensor in self._local().items():
            tensor.copy_(loaded[name])

    def close(self) -> None:
        pass
