"""`cairn branches`: lists the branches that `rl --branch` runs, and ends one at whatever step it is."""

import json
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from cairn.config.shared import LocalRun, ToolCommand
from cairn.run.branches import BranchChoice, Branches, BranchStates, shown_score
from cairn.run.errors import CairnError
from cairn.run.output import printable
from cairn.run.tables import print_table
from cairn.run.view import RunView


class ListBranches(ToolCommand):
    """List the branches of a run, with the metric that they are compared by, or end one of them.

    FOLDER is the --output-dir of rl --branch.
    """

    command: ClassVar[str] = "cairn branches"
    positional: ClassVar[tuple[str, ...]] = ("folder",)
    folder: LocalRun
    """The folder of all branches."""
    end: str | None = None
    """The name of a branch that takes no further step; if it is at work, it saves its step and stops."""
    reason: str = Field(default="ended by cairn branches", min_length=1)
    """Why, with --end."""

    @model_validator(mode="after")
    def _of_an_end(self) -> "ListBranches":
        if self.end is None and "reason" in self.model_fields_set:
            raise ValueError("--reason goes with --end NAME")
        return self

    def execute(self) -> int:
        """List them, after one was ended.

        Raises:
            UsageError: the folder holds no branches, or the one to end can't be ended.
        """
        branches = Branches(self.folder)
        states = branches.states() if self.end is None else branches.end(self.end, self.reason)
        rows = [_row(branches, states, name) for name in states.names]
        if self.as_json:
            choices = [vars(choice) for choice in states.choices]
            print(json.dumps({"metric": states.metric, "choices": choices, "branches": rows}, indent=2))
            return 0
        shown = [["-" if value is None else printable(str(value)) for value in row.values()] for row in rows]
        print_table(["branch", "state", "step", states.metric, "why"], shown)
        for choice in states.choices:
            print(f"after step {choice.step} the rule kept {', '.join(choice.kept)} of {_scores(choice)}")
        return 0


def _scores(choice: BranchChoice) -> str:
    """What a choice of the rule was made by, in words."""
    return ", ".join(f"{name} ({shown_score(score)})" for name, score in choice.scores.items())


def _row(branches: Branches, states: BranchStates, name: str) -> dict[str, Any]:
    """What there is to say of a branch."""
    view = RunView(Path(branches.run(name)))
    end, step = states.ended.get(name), branches.step(name)
    if view.run.is_locked():
        state = "ending" if end else "running"
    else:
        state = "ended" if end else "done" if step >= states.max_steps else "waiting"
    try:
        score = branches.score(states, name, step) if step else None
    except CairnError:  # it has no such column yet
        score = None
    mean = None if score is None else float(f"{score:.6g}")
    return {"branch": name, "state": state, "step": step, "score": mean, "why": end and end.reason}
