"""What kills cost, beside TRL: the schedule, what counts as lost, and the published page."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import lost_work
import lost_work_page
from lost_work import Kill, schedule

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def test_the_page_is_made_from_the_published_numbers():
    report = json.loads((RESULTS / "faults.json").read_text())
    assert (RESULTS / "faults.md").read_text() == lost_work_page.page(report)
    for name, task in report["tasks"].items():
        again = schedule(report["seed"], task["steps"], task["interval"], task["anywhere"], task["saving"])
        assert [Kill(**kill) for kill in task["schedule"]] == again, f"{name}: anybody can draw it again"
        assert {found["kills"] for found in task["systems"].values()} == {len(again)}


def test_kills_are_drawn_from_the_seed():
    kills = schedule(0, 40, 8, 3, 2)
    assert kills == schedule(0, 40, 8, 3, 2) != schedule(1, 40, 8, 3, 2)
    assert [kill.step for kill in kills] == sorted({kill.step for kill in kills})
    assert [kill.step % 8 for kill in kills if kill.saving] == [0, 0]
    assert len(kills) == 5
    assert all(0 < kill.step < 40 and 0 <= kill.share < 1 for kill in kills)
    with pytest.raises(ValueError, match="3 kills in 2 saves"):
        schedule(0, 9, 3, 1, 3)


WRITES = """
import json, os, pathlib, signal, sys
out = pathlib.Path(sys.argv[1]); out.mkdir(exist_ok=True)
rows = out / "metrics.jsonl"
done = max([int(path.name.partition("-")[2]) for path in out.glob("save-*")], default=0)
for step in range(done + 1, 9):
    if list(out.glob("save-*/broken")):
        sys.exit("this checkpoint can't be read")
    with rows.open("a") as file:
        file.write(json.dumps({"step": step, "loss": 1 / step}) + "\\n")
    if step % 2 == 0:
        save = out / f"save-{step}"; save.mkdir()
        if step == 4 and not (out / "killed").exists():
            (out / "killed").touch(); (save / "broken").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        (save / "last").touch()
"""


class Fragile(lost_work.System):
    """A program that is killed in the middle of its save of step 4, and then can't read what it finds."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", WRITES, str(self.out)]

    def saved(self, step: int) -> tuple[Path, Path]:
        return self.out / f"save-{step}", self.out / f"save-{step}" / "last"


@pytest.mark.slow
def test_a_run_that_needs_help_gets_it_and_it_is_counted(tmp_path: Path):
    """The newest checkpoint is removed after two failed starts, and the run goes on from the one before."""
    system = Fragile(lost_work.Task("sft", 8, 2, 0, 0), tmp_path / "run", tmp_path)
    disturbed = lost_work.Disturbed(system, calm=lost_work.Seen())
    seen = disturbed.run()
    assert (disturbed.failed, disturbed.by_hand) == (lost_work.TRIES, 1)
    assert seen.newest == 8
    assert disturbed.processor > 0
    assert [row["step"] for row in system.metrics.rows()] == [1, 2, 3, 4, 3, 4, 5, 6, 7, 8]
    (system.out / "save-2" / "broken").touch()
    (system.out / "save-8").rename(system.out / "save-7")
    with pytest.raises(RuntimeError, match="can't be read"):
        lost_work.Disturbed(system).run()


def test_samples_are_named_only_where_losses_are_the_same():
    assert lost_work_page._samples({"other_losses": 0}) == "0, 0"
    assert lost_work_page._samples({"other_losses": 3}) == "3 steps have other losses"
    assert lost_work_page._samples({"other_losses": 3, "lost": 2, "twice": 1}) == "2, 1"
