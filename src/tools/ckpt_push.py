"""The command `ckpt push`: a step's model in a repository of the Hugging Face hub."""

import contextlib
import json
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import check_files, load_manifest
from cairn.checkpoint.step_folder import StepFolder
from cairn.config.shared import Place, ToolCommand
from cairn.model.adapters import is_adapter
from cairn.run.errors import UsageError
from cairn.run.output import progress_bars
from cairn.tools.ckpt_output import print_json, say
from cairn.tools.ckpt_places import local, name_of, step_in

CARD = "README.md"


class Push(ToolCommand):
    """Upload a step's model to a repository of the Hugging Face hub."""

    command = "ckpt push"
    positional = ("step", "repository")
    step: Place
    """A step_N folder, or an output folder (its newest good step), or the URL of one."""
    repository: str
    """Name of the model repository, such as my-name/my-model; it is made if there is none."""
    branch: str = "main"
    """The branch that gets the commit; another one than main is made if there is none."""
    message: str | None = None
    """Message of the commit (default: the step and its run)."""
    private: bool = False
    """If the repository is made: only its owner sees it."""
    card: Path | None = None
    """A file to be the model card, README.md (default: one with what the step says of itself)."""

    def execute(self) -> int:
        from cairn.remote.hub import push  # its package takes a while to import

        if self.card and not self.card.is_file():
            raise UsageError(f"--card {self.card}: there is no such file")
        with contextlib.ExitStack() as stack:
            step = step_in(stack.enter_context(local(self.step, newest=True)))
            manifest = load_manifest(step)
            with progress_bars() as stage:
                check_files(step, manifest, on_bytes=stage(f"verifying {step.name}", manifest.nbytes))
            files: dict[str, Path | bytes] = dict(model_files(step))
            files[CARD] = self.card.read_bytes() if self.card else card_of(step)
            name = name_of(self.step, step)
            pushed = push(
                self.repository,
                files,
                message=self.message or f"Step {manifest.step} of run {manifest.run_id}",
                branch=self.branch,
                private=self.private or None,
                say=lambda line: None if self.as_json else say(line),
            )
        content: dict[str, Any] = {"step": name, "repository": self.repository, "branch": self.branch}
        if self.as_json:
            print_json({**content, "commit": pushed.commit, "url": pushed.url, "new": pushed.new})
        else:
            done = "is now" if pushed.new else "was already"
            say(f"the model of {name} {done} in {self.repository}, branch {self.branch}: {pushed.url}")
        return 0


def model_files(step: Path) -> dict[str, Path]:
    """The files of a verified step's `model/`, by their paths in it: a Hugging Face directory as it is."""
    folder = StepFolder(step).model
    prefix = f"{folder.name}/"
    names = [name.removeprefix(prefix) for name in load_manifest(step).files if name.startswith(prefix)]
    return {name: folder / name for name in names if name != CARD}


def card_of(step: Path) -> bytes:
    """The model card: base model, run, step, data type, settings, and digests of what was trained on."""
    from cairn.formats.huggingface.huggingface import model_card
    from cairn.formats.transfer.export_step import about_step

    folder, content = StepFolder(step).model, about_step(step)
    if is_adapter(folder):
        return model_card(content, None, "peft").encode()
    about = json.loads((folder / "config.json").read_text())
    return model_card(content, about.get("dtype") or about.get("torch_dtype")).encode()
