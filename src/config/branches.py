# Unchecked values have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Branches of an RL run: several settings files over one base, which share the servers, and the rule by which
the best of them is kept."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from cairn.config.arguments import Arguments, Layer, read_file
from cairn.config.settings import BaseConfig, Setting, separate
from cairn.run.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
KEEP = re.compile(r"([1-9][0-9]*):([1-9][0-9]*)")
OF_ALL: Mapping[tuple[str, ...], str] = {
    ("branch",): "a branch has no branches of its own",
    ("branches",): "one rule chooses between all branches",
    ("output_dir",): "each branch has a folder of its own in that of the whole",
    ("max_steps",): "the rule compares branches that take the same steps",
    ("stop_after",): "the turns of the branches say where each of them stops",
    ("model",): "all branches start from the same weights",
    ("inference",): "all branches ask the same servers",
    ("orchestrator", "inference_url"): "all branches ask the same servers",
    ("colocate",): "servers that sleep while one branch trains can't answer another one",
    ("ckpt", "resume"): "all branches start from the same step, and each goes on from its own newest one",
    (
        "ckpt",
        "resume_step",
    ): "all branches start from the same step, and each goes on from its own newest one",
    ("ckpt", "dir"): "each branch has its checkpoints in its own folder",
    ("ckpt", "remote"): "each branch has its checkpoints in its own folder",
    ("slurm",): "the command with all branches is what a job runs",
    ("dry_run",): "it is given to the command",
    ("machine",): "it is given to the command",
}
"""Settings that a branch can't have for itself, and why."""


@dataclass(frozen=True)
class KeepRule:
    """After `step` steps of each branch, the best `count` go on."""

    step: int
    count: int


class BranchesConfig(BaseConfig):
    """How the branches that --branch names share the servers, and which of them go on."""

    turn_steps: int = Field(default=10, ge=1)
    """Steps that a branch takes before it is the next one's turn."""
    at_once: int = Field(default=1, ge=1)
    """Branches that train at the same time; more than one takes trainer.lora.serve = "unmerged"."""
    metric: str = "reward/mean"
    """The column of metrics.jsonl by which branches are compared, such as eval/NAME/reward."""
    mode: Literal["max", "min"] = "max"
    """Whether a larger value of it is better, or a smaller one."""
    window: int = Field(default=5, ge=1)
    """Steps over which it is averaged."""
    keep: list[str] = []
    """STEP:COUNT, such as 10:2 20:1: after step 10 the best two branches go on, after 20 the best one."""
    share_answers: bool = True
    """Take answers that another branch has sampled, as far as max_off_policy_steps allows."""

    @field_validator("keep")
    @classmethod
    def _rising_steps_and_falling_counts(cls, value: list[str]) -> list[str]:
        parts = separate(value)
        for part in parts:
            if not KEEP.fullmatch(part):
                raise ValueError(f"{part!r} is not STEP:COUNT, such as 10:2 (after step 10, keep 2 branches)")
        rules = [_rule(part) for part in parts]
        for before, after in itertools.pairwise(rules):
            if after.step <= before.step or after.count >= before.count:
                raise ValueError(
                    f"{after.step}:{after.count} after {before.step}:{before.count}: give later steps, with "
                    "fewer branches at each"
                )
        return parts

    @property
    def rules(self) -> list[KeepRule]:
        """`keep`, by rising steps."""
        return [_rule(part) for part in self.keep]


def _rule(part: str) -> KeepRule:
    step, _, count = part.partition(":")
    return KeepRule(int(step), int(count))


def layers_of(files: Sequence[str]) -> dict[str, Layer]:
    """The file of each branch by the branch's name, which is the file's without its suffix.

    Raises:
        UsageError: a file can't be read, or a name is there twice.
    """
    found: dict[str, Layer] = {}
    for file in files:
        name = Path(file).stem
        if name in found:
            raise UsageError(
                f"--branch {file}: {found[name].file} is called {name!r} as well; give each branch a file "
                "with a name of its own"
            )
        found[name] = Layer(file, (), read_file(file))
    return found


def check_names(branches: Mapping[str, Layer]) -> None:
    """Refuse a single branch, and names with which no folder can be called.

    Raises:
        UsageError: the settings of branches have such a name.
    """
    for name, layer in branches.items():
        if not NAME.fullmatch(name):
            raise UsageError(
                f"--branch {layer.file}: the branch would be called {name!r}; give the file a name of "
                "letters, digits, dots, dashes and underscores"
            )
    if len(branches) == 1:
        (only,) = branches.values()
        raise UsageError(f"--branch {only.file}: one branch is no choice; give two or more, or @ {only.file}")


def with_branch(arguments: Arguments, root: Setting, branch: Layer) -> Arguments:
    """A command line with a branch's settings over its files and flags.

    Raises:
        UsageError: they have a setting that no branch may have for itself.
    """
    shared: Mapping[str, Sequence[str]] = getattr(root.models[0], "shared", {})
    for path in _paths(branch.content, root):
        for own, why in OF_ALL.items():
            if path[: len(own)] == own:
                raise UsageError(
                    f"--branch {branch.file}: {'.'.join(path)} can't differ between branches: {why}"
                )
        if len(path) > 1 and path[1] in shared.get(path[0], ()):
            raise UsageError(
                f"--branch {branch.file}: {'.'.join(path)}: all roles share this value; give it once, as "
                f"{'.'.join(path[1:])}"
            )
    flags = [*(flag for flag in arguments.flags if flag[0] != ("branch",)), (("branch",), [])]
    return replace(arguments, flags=flags, over=[*arguments.over, branch])


def _paths(content: Mapping[str, Any], root: Setting, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where the settings of a file are, as they are called, whichever of its names each is given by."""
    found: list[tuple[str, ...]] = []
    for key, value in content.items():
        setting = root.find((*above, key))
        path = setting.path if setting else (*above, key)
        if isinstance(value, dict) and setting is not None and setting.kind == "section" and value:
            found += _paths(value, root, path)
        else:
            found.append(path)
    return found
