"""The `ckpt` command: inspects and manages checkpoints, with or without a run around them."""

from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.store import CheckpointStore
from cairn.config.shared import LocalRun, Place, ToolCommand
from cairn.formats.transfer.diff import compare
from cairn.remote.uploads import note_origin
from cairn.run.errors import UsageError
from cairn.run.output import progress_bars
from cairn.tools.ckpt_formats import AverageSteps, Export, Import
from cairn.tools.ckpt_output import print_audit, print_diff, print_json, print_manifest, say
from cairn.tools.ckpt_places import (
    flags_to_resume,
    local,
    name_of,
    new_run,
    refuse_empty,
    run_config,
    side,
    step_at,
    step_folder,
    tier_at,
)
from cairn.tools.ckpt_plan import MakePlan
from cairn.tools.ckpt_push import Push
from cairn.tools.ckpt_replay import Bisect, Prove, ReplaySteps
from cairn.tools.ckpt_steps import Copy, ListSteps, Prune


class Show(ToolCommand):
    """Print a checkpoint's manifest."""

    command = "ckpt show"
    positional = ("step",)
    step: Place
    """A step_N folder, or its URL."""

    def execute(self) -> int:
        tier, step = step_at(self.step)
        manifest = tier.manifest(step)
        if self.as_json:
            print_json(manifest.model_dump())
            return 0
        print_manifest(manifest)
        return 0


class Verify(ToolCommand):
    """Check every byte; exit code 1 on damage."""

    command = "ckpt verify"
    positional = ("path",)
    path: Place
    """An output folder, its checkpoints folder, or a step_N folder, or the URL of one in an object store."""

    def execute(self) -> int:
        tier, only = tier_at(self.path)
        steps = tier.steps() if only is None else [only]
        refuse_empty(tier, steps)
        results: list[dict[str, Any]] = []
        with progress_bars() as stage:
            for step in steps:
                name, problem = tier.name_of(step), None
                try:
                    done = stage(name.rpartition("/")[2], tier.manifest(step).nbytes)
                    tier.verify(step, on_bytes=done)
                except CheckpointError as error:
                    problem = str(error)
                results.append({"folder": name, "ok": problem is None, "problem": problem})
        if self.as_json:
            print_json(results)
        else:
            for result in results:
                say(f"{result['folder']}: {'ok' if result['ok'] else 'DAMAGED: ' + result['problem']}")
        return 0 if all(result["ok"] for result in results) else 1


class Diff(ToolCommand):
    """Compare two checkpoints."""

    command = "ckpt diff"
    positional = ("a", "b")
    a: Place
    """A step_N folder, its URL, or another program's checkpoint."""
    b: Place
    """Another."""
    top: int = 10
    """Number of tensors to print (with --json: all)."""

    def execute(self) -> int:
        with side(self.a) as a, side(self.b) as b, progress_bars() as stage:
            report = compare(a, b, stage)
        for of_side, given in (("a", self.a), ("b", self.b)):
            report[of_side]["folder"] = str(given)
        if self.as_json:
            print_json(report)
            return 0
        print_diff(report, top=self.top)
        return 0


class Fork(ToolCommand):
    """Copy a checkpoint into a new run's output folder."""

    command = "ckpt fork"
    positional = ("step", "output_dir")
    step: Place
    """A step_N folder, or its URL."""
    output_dir: Place
    """Output folder of the new run, without checkpoints, or the URL for it."""
    link: bool = False
    """Share the tensor files with the checkpoint by hard links: no copy, but damage is shared, too."""

    def execute(self) -> int:
        from cairn.checkpoint.fork import fork  # imports numpy, which would slow down --help

        target = self.output_dir
        if self.link and isinstance(target, str):
            raise UsageError(f"--link: {target} is a URL, where no hard links can be; leave out --link")
        with local(self.step, near=target) as found, new_run(target) as run:
            step = step_folder(found)
            made, forked = fork(step, run, link=self.link)
            if url := self.step if isinstance(self.step, str) else _uploaded(step):
                note_origin(CheckpointStore(made.parent), url)
        folder = name_of(target, made)
        if self.as_json:
            parent = forked.parent.model_dump() if forked.parent else None
            print_json({"folder": folder, "run_id": forked.run_id, "parent": parent})
        else:
            say(f"{folder} is step {forked.step} of the new run {forked.run_id}; resume it with")
            say(f"  {flags_to_resume(target)}")
        return 0


class Audit(ToolCommand):
    """Check that a run trained on everything exactly once; exit code 1 if not."""

    command = "ckpt audit"
    positional = ("run",)
    run: LocalRun
    """An output folder; the run may be going on."""
    data: bool = False
    """SFT: also compare batches with the data, by content."""

    def execute(self) -> int:
        from cairn.tools.audit import audit  # imports numpy, which would slow down --help

        report = audit(self.run, data=self.data)
        if self.as_json:
            print_json(report.to_json())
        else:
            print_audit(report)
        return 0 if report.ok else 1


def _uploaded(step: Path) -> str | None:
    """Where the step was uploaded to, if its run has an object store."""
    url = (run_config(step.parent).get("ckpt") or {}).get("remote")
    return f"{url}/{step.name}" if isinstance(url, str) else None


COMMANDS = {
    command.command.removeprefix("ckpt "): command
    for command in (
        *(ListSteps, Show, Verify, Diff, Prune, Fork, Copy, AverageSteps, Import, Export, Push),
        *(Audit, ReplaySteps, Prove, Bisect, MakePlan),
    )
}
