"""Batches that are made again from the answers in the ledger are compared with what was shipped."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cairn.config.ckpt import CkptConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.policy_sync.resume import Remade, note_lost
from cairn.orchestrator.state import OrchestratorState, ShippedSteps, ShippingProgress
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import read_json, write_json
from cairn.run.messages import Attempt, ShippedBatch

ATTEMPT = Attempt("run", 2, "rl", start_step=6, resume_from=None, branch="branch_1")
SEVEN = ShippedBatch(7, [[24, 27]], 8, 100, "aaaa", 6)
EIGHT = ShippedBatch(8, [[28, 31]], 8, 100, "bbbb", 7)
KEPT = range(24, 32)


def state(folder: Path, *, newest: int = 6, changes: tuple[dict[str, Any], ...] = (), **config: Any) -> Any:
    """An orchestrator that has taken up the run from step 6."""
    run = RunDirectory(folder)
    folder.mkdir(exist_ok=True)
    recipe = {"changes": list(changes)}
    write_json(run.recipe, {"trainer": {}, "orchestrator": recipe})
    found = SimpleNamespace(
        run=run,
        attempt=ATTEMPT,
        recipe=recipe,
        shipped=ShippedSteps(ShippingProgress(step=newest)),
        config=OrchestratorConfig(**config),
        ledger=SimpleNamespace(path=run.ledger),
    )
    return cast(OrchestratorState, found)


def another(batch: ShippedBatch, **changed: Any) -> ShippedBatch:
    return ShippedBatch(**{**vars(batch), "digest": "cccc", **changed})


def test_a_batch_that_is_the_same_again_is_no_change(tmp_path: Path):
    """Its expectation is forgotten once it has a file."""
    here = state(tmp_path)
    note_lost(here.run, ATTEMPT, [SEVEN, EIGHT])
    remade = Remade(here, KEPT)
    remade.check(SEVEN)
    remade.shipped(7)
    assert [row["step"] for row in read_json(here.run.remade, dict)["batches"]] == [8]
    remade.check(EIGHT)
    remade.shipped(8)
    assert not here.run.remade.exists()
    assert not here.run.history.path.exists()
    remade.check(another(EIGHT, step=9))


def test_another_batch_of_the_same_answers_is_refused_at_each_resume(tmp_path: Path):
    """Also by a process that finds no row in the ledger any more, since that was unshipped."""
    here = state(tmp_path)
    note_lost(here.run, ATTEMPT, [SEVEN, EIGHT])
    with pytest.raises(UsageError, match=r"batch 7, .* \(digest cccc, aaaa on record\)") as refused:
        Remade(here, KEPT).check(another(SEVEN))
    assert "remove that file" in str(refused.value)
    assert "--ckpt.accept-changes batches" in str(refused.value)
    again = state(tmp_path)
    note_lost(again.run, ATTEMPT, [])
    with pytest.raises(UsageError):
        Remade(again, KEPT).check(another(SEVEN))


def test_an_accepted_one_is_recorded(tmp_path: Path):
    """In the history, in recipe.json, and so in all later checkpoints."""
    here = state(tmp_path, ckpt=CkptConfig(accept_changes=["batches"]))
    note_lost(here.run, ATTEMPT, [SEVEN])
    Remade(here, KEPT).check(another(SEVEN))
    (event,) = here.run.history.rows()
    assert (event["event"], event["name"], event["was"], event["now"], event["accepted"], event["step"]) == (
        *("change", "batches.7", "aaaa", "cccc", True, 6),
    )
    assert here.recipe["changes"] == read_json(here.run.recipe, dict)["orchestrator"]["changes"] != []


@pytest.mark.parametrize("name", ["advantage.code", "advantage.args", "environments.one.overlong.type"])
def test_a_changed_advantage_explains_it(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture):
    """It is said and recorded; what was changed before an earlier checkpoint explains nothing."""
    change = {"step": 6, "name": name, "was": 1, "now": 2, "accepted": False}
    here = state(tmp_path, changes=(change,))
    note_lost(here.run, ATTEMPT, [SEVEN])
    Remade(here, KEPT).check(another(SEVEN))
    assert f"{name} was changed after step 6" in caplog.text
    assert [row["name"] for row in here.run.history.rows()] == ["batches.7"]
    for number, other in enumerate(({**change, "step": 3}, {**change, "name": "max_off_policy_steps"})):
        early = state(tmp_path / str(number), changes=(other,))
        note_lost(early.run, ATTEMPT, [SEVEN])
        with pytest.raises(UsageError):
            Remade(early, KEPT).check(another(SEVEN))


def test_what_can_not_be_compared_is_not(tmp_path: Path):
    """Answers that are sampled again, other prompts, logprobs of a server, another branch."""
    lost = [SEVEN, EIGHT]
    here = state(tmp_path / "partial")
    note_lost(here.run, ATTEMPT, lost)
    Remade(here, range(24, 31)).check(another(EIGHT))
    here = state(tmp_path / "dropped")
    note_lost(here.run, ATTEMPT, lost)
    remade = Remade(here, KEPT)
    remade.forget(29)
    remade.check(another(EIGHT))
    with pytest.raises(UsageError):
        remade.check(another(SEVEN))
    remade.check(another(SEVEN, places=[[24, 26], [30, 30]]))
    here = state(tmp_path / "served", teachers={"teacher_logprobs": "http://teacher"})
    note_lost(here.run, ATTEMPT, lost)
    Remade(here, KEPT).check(another(SEVEN))
    here = state(tmp_path / "branch")
    note_lost(here.run, Attempt("run", 1, "rl", 6, None, "branch_0"), lost)
    Remade(here, KEPT).check(another(SEVEN))
    assert not here.run.remade.exists()
