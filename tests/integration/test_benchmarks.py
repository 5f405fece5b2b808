"""The benchmarks run, and print what they say. How fast anything is, is not a test's business.

In each commit one of them runs, and all read their command lines; all run with `-m soak`. TRL's part is only
there where it is installed (`uv sync --group bench`).
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import REPOSITORY, run_python

pytestmark = pytest.mark.timeout(600)

HAS_TRL = importlib.util.find_spec("trl") is not None


def report(name: str, *arguments: object) -> dict[str, Any]:
    """The object on the last line of a quick run."""
    command = [sys.executable, f"benchmarks/{name}.py", "--quick", "--json", *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def with_trl(*names: str) -> list[str]:
    """The systems that are there."""
    return [name for name in names if HAS_TRL or not name.startswith("trl")]


SCRIPTS = sorted(
    path.stem for path in (REPOSITORY / "benchmarks").glob("*.py") if "ArgumentParser" in path.read_text()
)
HELP = """
import contextlib, io, runpy, sys
import cairn
for script in sys.argv[1:]:
    shown = io.StringIO()
    sys.argv, sys.path[0] = [script, "--help"], "benchmarks"
    with contextlib.redirect_stdout(shown):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            assert not end.code, (script, end.code)
    print(script, "usage: " in shown.getvalue())
"""


def test_all_read_their_command_lines():
    """All in one process, since imports take longest: what they import of the package is there."""
    scripts = [f"benchmarks/{name}.py" for name in SCRIPTS]
    done = run_python("-c", HELP, *scripts)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{script} True" for script in scripts]


@pytest.mark.soak
def test_sft():
    found = report("sft")
    assert list(found["systems"]) == with_trl("cairn", "bare", "trl_padded", "trl_packed")
    rates = {name: values["tokens_per_s"] for name, values in found["systems"].items()}
    for name, values in found["systems"].items():
        assert values["rounds"] == [rates[name]]
        tokens = values["tokens_per_s"] * values["step_ms"] / 1000
        assert tokens == pytest.approx(64 * 11.5, rel=0.1), f"{name}: useful tokens of 64 records"


@pytest.mark.soak
def test_startup():
    found = report("startup")
    assert list(found["systems"]) == with_trl("cairn", "trl", "bare")
    assert all(values["first_step_s"] > 0 for values in found["systems"].values())
    assert found["ratios"].keys() == {f"cairn / {name}" for name in with_trl("trl", "bare")}


def test_records():
    found = report("records")
    keys = {"open_s", "again_s", "batch_s", "again_batch_s", "pass_s", "peak_mb", "cache_mb"}
    assert all(found[way].keys() == keys for way in ("cairn", "datasets", "limit"))
    assert found["mb"] == pytest.approx(1, rel=0.1)
    assert found["records"] > 100


@pytest.mark.soak
def test_lost_work():
    found = report("lost_work")["tasks"]["sft"]
    assert list(found["systems"]) == with_trl("cairn", "cairn, worker", "trl")
    for name, values in found["systems"].items():
        assert values["kills"] == 2
        assert values["seconds"] > values["seconds_calm"] > 0
        if name != "trl":
            assert values["same_weights"]
            assert (values["other_losses"], values["by_hand"], values["failed_starts"]) == (0, 0, 0)


@pytest.mark.soak
def test_watching():
    found = report("watching")
    assert found["page_answers"] > 0
    for name in ("step", "processor"):
        low, high = found[name]["interval"]
        assert 0 < low <= found[name]["ratio"] <= high
        assert len(found[name]["ratios"]) == found["pairs"]
    assert found["watchers_cores"] > 0
    assert found["spans"]["a_step"] >= 1, "the trainer notes each step"


@pytest.mark.soak
def test_rl():
    tiny = report("rl")["tasks"]["tiny"]
    exact, overlapped = tiny["systems"]["cairn_k0"], tiny["systems"]["cairn_k1"]
    assert exact["staleness"] == 0 <= overlapped["staleness"] <= 1
    assert tiny["bound"]["step_s"] == max(exact["generate_s"], exact["train_s"]) > 0
    assert {"cairn_k0 / cairn_k1", "cairn_k1 / bound"} <= tiny["ratios"].keys()


@pytest.mark.soak
def test_orchestrator():
    (row,) = report("orchestrator")["lengths"]["2048"].values()
    assert row["cairn"].keys() == {"tokens_per_cpu_s", "tokens_per_s", "chunk_ms", "ledger_bytes_per_token"}
    assert row["cairn"]["ledger_bytes_per_token"] > 8  # an id and a logprob


@pytest.mark.soak
def test_weights():
    low = ("--dtype", "bfloat16", "--lr", 1e-6)
    runs = report("weights", "--encodings", "full", "delta", *low)["runs"]
    for run in runs:
        times = {name: found for name, found in run["all"].items() if name != "disk"}
        assert all(len(found) == run["repeats"] for found in times.values())
        assert run["empty_s"] > 0
        for write, push, publish in zip(times["write"], times["push"], times["publish"], strict=True):
            assert write + push == pytest.approx(publish)
    full, delta = runs
    assert len(full["all"]["disk"]) == full["repeats"]
    assert full["pushed_bytes"] == full["bytes"] == delta["bytes"]
    assert delta["pushed_bytes"] < full["bytes"] / 20


@pytest.mark.soak
def test_checkpoint(tmp_path: Path):
    found = report("checkpoint", "--dir", tmp_path)
    keys = {"stall_s", "lost_s", "durable_s", "extra_bytes", "cached_share"}
    keys |= {"load_cold_s", "raw_cold_s", "load_warm_s", "raw_warm_s"}
    assert {"cairn", "dcp_save", "dcp_thread", "torch_save", "safetensors"} <= found["systems"].keys()
    assert all(values.keys() == keys for values in found["systems"].values())
    assert found["limits"].keys() == {"memcpy_s", "write_fsync_s"}
    assert found["state_bytes"] == pytest.approx(12 * found["runs"][0]["params"], rel=0.2)


@pytest.mark.soak
def test_formats(tmp_path: Path):
    found = report("formats", "--dir", tmp_path)
    assert list(found["operations"]) == [
        *("import", "import_unverified", "export", "export_unverified", "transformers_bf16", "dcp_load_save"),
    ]
    for name, values in found["operations"].items():
        assert values["of_raw"] == pytest.approx(values["raw_seconds"] / values["seconds"]), name
        assert values["rounds"] == [values["of_raw"]]
    assert found["allowed_bytes"] == pytest.approx(300e6 + 1.2 * found["largest_bytes"])
    for name in ("import", "export"):
        assert found["operations"][name]["beyond_bytes"] < found["allowed_bytes"], name


@pytest.mark.soak
def test_remote(tmp_path: Path):
    found = report("remote", "--dir", tmp_path)
    assert found["servers"].keys() == {"null", "localbucket", "file"}
    for name, row in found["servers"].items():
        assert row["put_of_raw"] == pytest.approx(row["raw_put_s"] / row["put_s"]), name
        assert row["fetch_of_raw_disk"] == pytest.approx(row["raw_get_disk_s"] / row["fetch_s"]), name
        assert row["resume_s"] == pytest.approx(row["resume_fetch_s"] + row["resume_load_s"]), name
    assert found["limits"].keys() == {"loopback_s", "disk_s"}
    sft = found["sft"]
    assert sft["remote"]["uploaded"] >= 1
    assert sft["ratios"]["remote / local, step_ms"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_gpu():
    """On a CPU, with the smallest shape."""
    found = report("gpu")
    assert found["gather"]["ranks"] == 2
    assert found["gather"]["bytes_per_s"] > 0
    shape = found["shapes"]["tiny"]
    assert shape["sft"]["saves"] >= 2
    assert shape["sft"]["estimated_gib"] > 0
    assert shape["sft"]["busy"] is shape["sft"]["peak_gib"] is None, "there is no GPU to look at"
    assert (shape["rl"]["servers"], shape["rl"]["transport"]) == (1, "files")
    assert 0 <= shape["sft"]["stall_s"] <= shape["sft"]["durable_s"]
    for part in ("sft", "bare"):
        values = shape[part]
        assert values["of_matmul"] == pytest.approx(values["tflops"] * 1e12 / found["limits"]["matmul_flops"])
        # 0.6M parameters in matrices, and attention over 128 tokens
        assert values["tflops"] * 1e12 / values["tokens_per_s"] == pytest.approx(
            6 * 0.6e6 + 6 * 3 * 128**2, rel=0.1
        )
    assert shape["ratios"].keys() == {"cairn / bare, per GPU"}
    assert shape["rl"]["push_bytes"] > 4 * 0.5e6
    assert 0 < shape["rl"]["push_s"] < shape["rl"]["step_s"] * 20
    assert shape["rl"]["staleness"] <= 1


@pytest.mark.soak
def test_lora():
    found = report("lora")
    full, adapter = found["full"], found["adapter"]
    assert adapter["trained"] < full["trained"] / 10
    assert adapter["save_bytes"] < full["save_bytes"] / 10
    assert adapter["push_bytes"] < full["push_bytes"] / 10
    assert adapter["copy_s"] > 0
