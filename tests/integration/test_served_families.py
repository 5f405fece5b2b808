"""What a server gives tokens is what the trainer's model gives them: at the start, and after every push.

So are the experts that it tells of each token, on CPUs, for families that keep all tokens' keys and values.

Of a few typical families, drawn by the commit; `pytest -m families` tries all of families.py, in minutes.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path

import draws
import pytest
from families import FAMILIES, SERVED, UNSERVED
from runs import run_python

TYPICAL = ("qwen3_tied", "llama", "phi", "mistral_sliding", "qwen3_moe", "gpt_oss", "falcon_h1", "lfm2_moe")
IN_A_COMMIT = 3
SCRIPT = Path(__file__).with_name("serve_families.py")
ENVIRONMENT = {
    "VLLM_PLUGINS": "cairn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
ROUNDING = {"yes": 3e-6, "up to 3e-4": 3e-4}
ALMOST_ALL = 0.99
"""Of the experts that a server tells, the share that transformers chooses, too: two may be equally good."""


def find_out(families: Iterable[str], folder: Path) -> dict[str, dict]:
    """What comes of serving each, all in one process of their own."""
    result = run_python(SCRIPT, folder, *families, environment=ENVIRONMENT, vllm=True)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert result.returncode == 0, result.stderr[-3000:]
    return {line["family"]: line for line in lines}


def assert_as_in_the_table(found: dict[str, dict], families: Iterable[str]) -> None:
    assert set(found) == set(families)
    assert not [line for line in found.values() if not _is_as_in_the_table(line)]


def _is_as_in_the_table(line: dict) -> bool:
    family = line["family"]
    if family in UNSERVED:
        return UNSERVED[family] in line.get("error", "")
    differences = line.get("differences", ())
    right = len(differences) == 4 and max(differences) < ROUNDING[SERVED[family]]
    return right and line["experts"] > ALMOST_ALL and line["start_differs"] == []


@pytest.mark.timeout(900)
def test_typical_families_are_served_as_they_are_trained(tmp_path: Path):
    """And heads that the kernels do not take are refused at the start: vLLM dies of them at a request. Two
    experts that the start has exchanged are noticed by the first update of the same files.

    All in one process, since its imports take longest.
    """
    drawn = random.Random(draws.seed(__name__)).sample(TYPICAL, IN_A_COMMIT)
    found = find_out(["heads_of_16", "loaded_wrongly", *drawn], tmp_path)
    error, wrong = found.pop("heads_of_16")["error"], found.pop("loaded_wrongly")
    (exchanged,) = wrong["start_differs"]
    assert "layers.1." in exchanged
    assert exchanged.endswith("w2_weight")
    at_start, *updated = wrong["differences"]
    assert at_start > 100 * max(updated)
    assert_as_in_the_table(found, drawn)
    assert "this model can't be served: its attention heads have size 16 (head_dim in config.json)" in error


@pytest.mark.families
@pytest.mark.timeout(1800)
def test_all_families_are_served_as_they_are_trained_or_refused(tmp_path: Path):
    assert_as_in_the_table(find_out(FAMILIES, tmp_path), FAMILIES)
