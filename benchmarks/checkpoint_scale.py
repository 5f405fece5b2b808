"""How the checkpoint code scales with steps, tensors and ranks; part of benchmarks/checkpoint.py."""

import contextlib
import json
import tempfile
import time

from cairn.checkpoint.checksums import CHUNK_BYTES, FileChecksum, make_receipt, read_receipt
from cairn.checkpoint.eval_metrics import Ratings
from cairn.checkpoint.manifest import FileEntry, Manifest, parse
from cairn.checkpoint.retention import SavedStep, read_steps, reasons_to_keep
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.layout import TensorSpec, plan, plan_rank
from cairn.config.ckpt import CkptConfig


def measure_scale(steps: int) -> dict[str, float]:
    """Seconds for listing, choosing and retention with many steps, and for planning with many tensors."""
    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(what: str):
        started = time.perf_counter()
        yield
        seconds[what] = time.perf_counter() - started

    about = {
        **{
            "run_id": "scale",
            "attempt": 1,
            "branch": "main",
            "parent": None,
            "created": "",
            "parts": ["trainer"],
        },
        **{"world_size": 4096, "dtypes": {}, "metrics": {"loss": 1.0}, "versions": {}, "config_digest": ""},
    }
    with tempfile.TemporaryDirectory() as temporary:
        store = CheckpointStore(temporary)
        for step in range(1, steps + 1):
            store.folder(step).mkdir()
            (store.folder(step) / "manifest.json").write_bytes(
                Manifest(step=step, files={}, **about).to_json()
            )
        with timed(f"latest of {steps} steps"):
            assert store.latest() == steps
        with timed(f"list {steps} steps"):
            assert len(store.steps()) == steps
        with timed(f"read {steps} manifests"):
            read_steps(store, Ratings())
    rules = CkptConfig(keep_last=3, keep_every=1000, keep_best=5, metric="loss", mode="min")
    with timed(f"retention over {steps} steps"):
        reasons_to_keep([SavedStep(step, {"loss": 1 / step}) for step in range(1, steps + 1)], rules, set())

    tensors, ranks = 10 * steps, 4096
    specs = [TensorSpec(f"layers.{i}.weight", "BF16", (4096, 128)) for i in range(tensors)]
    with timed(f"plan {tensors} tensors"):
        files, _ = plan(specs, "model")
    shard = specs[0].nbytes // ranks
    held = {spec.name: [(7 * shard, shard)] for spec in specs}
    with timed(f"plan one of {ranks} ranks"):
        plan_rank(files, held, with_headers=False)
    own = {
        file.name: FileChecksum(file.size, dict.fromkeys(range(file.size // CHUNK_BYTES), 1))
        for file in files
    }
    part = json.dumps(make_receipt("scale", own))
    merged = {file.name: FileChecksum(file.size) for file in files}
    with timed("add up the parts of 64 ranks"):
        for _ in range(64):
            for name, checksum in read_receipt(json.loads(part)).items():
                merged[name].merge(checksum)
    with timed(f"write a manifest of {tensors} tensors"):
        entries = {file.name: FileEntry.of(file.size, [0] * -(-file.size // CHUNK_BYTES)) for file in files}
        text = Manifest(step=1, files=entries, **about).to_json()
    with timed(f"read a manifest of {tensors} tensors"):
        parse(text, "manifest")
    return seconds
