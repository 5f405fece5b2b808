"""What a power cut would leave: the order in which a save writes, makes durable and renames.

A power cut can't be had in a test. What it can destroy is what was not made durable before: so the calls of
all processes of a save are traced as the system sees them.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SAVE = """
import sys
import torch
from cairn.checkpoint.saving.saver import SaveOptions, Saver, SavingRank
from cairn.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1])
saver = Saver(store, SavingRank(0, 1, "now"), how=SaveOptions(max_file_bytes=1_500_000))
about = dict(run_id="x", attempt=1, branch="x", parent=None, parts=["trainer"], world_size=1, dtypes={},
             metrics={}, versions={}, config_digest="")
tensors = {
    "model/model": {"long": torch.randn(300_001), "longer": torch.randn(300_001), "short": torch.randn(5)},
    "trainer/optimizer": {"m": torch.randn(300_001)},
}
saver.save(1, tensors, {"model/config.json": b"{}", "trainer/state.json": b"{}"}, about)
saver.finish()
store.delete(1)
saver.close()
"""
CALLS = "mkdir,fsync,fdatasync,rename,write,pwrite64,ftruncate,unlink,unlinkat,rmdir"
LINE = re.compile(r"\d+ +(\w+)\((.*)\) += 0?\d+.*")
RESUMED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")


NOTE = re.compile(r"/step_1/\.(begun|\w+\.part)\.json|/step_1/\..*\.tmp")
"""Files by which the processes of a save tell each other how far they are."""


class Disk:
    """What is durable: contents of files since their last sync, names since their folder's."""

    def __init__(self):
        self.unsynced: set[str] = set()
        """Files whose content was written since, folders whose names were changed since."""
        self.files: set[str] = set()
        self.names: dict[str, set[str]] = {}
        """Names that a folder does not durably have yet."""

    def write(self, path: str) -> None:
        if path not in self.files:
            self.files.add(path)
            self.add_name(path)
        self.unsynced.add(path)

    def add_name(self, path: str) -> None:
        if path == "/":
            return  # whoever made the run's folder answers for what is above the checkpoints
        self.names.setdefault(str(Path(path).parent), set()).add(path)

    def sync(self, path: str) -> None:
        self.unsynced.discard(path)
        self.names.pop(path, None)

    def rename(self, old: str, new: str) -> None:
        self.files = self.files - {old} | {new}
        if old in self.unsynced:
            self.unsynced = self.unsynced - {old} | {new}
        else:
            self.unsynced.discard(new)
        self.add_name(new)

    def at_risk(self) -> set[str]:
        """What a power cut could destroy or hide."""
        return (self.unsynced & self.files).union(*self.names.values())


Calls = list[tuple[str, str, str]]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    """One save of step 1, then its deletion: (what, path, new path), as far as it is below the root."""
    if not shutil.which("strace"):
        pytest.skip("needs strace")
    folder = tmp_path_factory.mktemp("trace")
    root, log = folder / "checkpoints", folder / "strace.log"
    strace = ["strace", "-f", "-y", "-qq", "-s", "0", "-e", f"trace={CALLS}", "-o", str(log)]
    command = [*strace, sys.executable, "-c", SAVE, str(root)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "PTRACE" in result.stderr or "ptrace" in result.stderr:
        pytest.skip(f"strace is not permitted here: {result.stderr.splitlines()[0]}")
    assert result.returncode == 0, result.stderr
    found, begun = [], {}
    for line in log.read_text().splitlines():
        if line.endswith("<unfinished ...>"):
            begun[line.split()[0]] = line.removesuffix("<unfinished ...>")
            continue
        if match := RESUMED.fullmatch(line):
            line = begun.pop(match[1]) + match[2].lstrip()
        match = LINE.fullmatch(line)
        paths = re.findall(rf"{re.escape(str(root))}(/[^>\"]*)?(?=[>\"])", match[2]) if match else []
        if paths:
            what = {"fdatasync": "fsync", "pwrite64": "write", "ftruncate": "write"}.get(match[1], match[1])
            found.append((what, *[path or "/" for path in [*paths, ""][:2]]))
    return found


def index_of(calls: Calls, what: str, path: str, new: str | None = None) -> int:
    return next(i for i, call in enumerate(calls) if call[:2] == (what, path) and new in (None, call[2]))


def committed(calls: Calls) -> int:
    """Where the manifest gets its name."""
    return index_of(calls, "rename", "/step_1/.manifest.json", "/step_1/manifest.json")


def disk_after(calls: Calls) -> Disk:
    disk = Disk()
    for what, path, new in calls:
        if what == "mkdir":
            disk.add_name(path)
        elif what == "write":
            disk.write(path)
        elif what == "fsync":
            disk.sync(path)
        elif what == "rename":
            disk.rename(path, new)
        elif what.startswith(("unlink", "rmdir")):
            disk.files.discard(path)
            for names in disk.names.values():
                names.discard(path)
    return disk


def test_all_is_durable_before_the_manifest_has_its_name(calls: Calls):
    """Every byte and every name in the step; the step's own name may come with the manifest's."""
    disk = disk_after(calls[: committed(calls)])
    expected = {
        *(f"/step_1/model/model-0000{i}-of-00002.safetensors" for i in (1, 2)),
        "/step_1/model/model.safetensors.index.json",
        "/step_1/model/config.json",
        "/step_1/trainer/optimizer.safetensors",
        "/step_1/trainer/state.json",
        "/step_1/.manifest.json",
    }
    notes = {path for path in disk.files if NOTE.fullmatch(path)}
    assert expected == disk.files - notes, "the trace has them all"
    assert disk.at_risk() - notes - {"/step_1", "/step_1/.manifest.json"} == set()
    assert "/step_1/.manifest.json" not in disk.unsynced


def test_a_committed_step_is_durable(calls: Calls):
    """Before the save is reported as done, nothing of it is at risk."""
    end = index_of(calls, "unlink", "/step_1/manifest.json")
    assert committed(calls) < end
    assert {path for path in disk_after(calls[:end]).at_risk() if not NOTE.fullmatch(path)} == set()


def test_a_deleted_step_durably_ceases_to_exist_first(calls: Calls):
    """Its manifest goes, durably, and only then the first of its files."""
    start = index_of(calls, "unlink", "/step_1/manifest.json")
    after = [call[:2] for call in calls[start + 1 :]]
    assert after[0] == ("fsync", "/step_1")
    assert any(what.startswith(("unlink", "rmdir")) for what, _ in after)


def test_the_trace_shows_direct_and_shared_writes(calls: Calls):
    """What the tests above stand on: the writer's and the trainer's calls are both there."""
    written = [path for what, path, _ in calls if what == "write"]
    assert written.count("/step_1/trainer/optimizer.safetensors") > 1
    assert any(path.endswith(".tmp") for path in written)
