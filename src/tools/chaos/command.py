"""`cairn chaos`: strikes runs with seeded disasters, checks Cairn's promises, and writes what it cost."""

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cairn.config.cli import load
from cairn.config.shared import ToolCommand
from cairn.run.errors import UsageError
from cairn.run.files import make_folders, write_atomic
from cairn.run.output import counted
from cairn.tools.chaos.bench import COMMANDS, CONFIGS

VIOLATED = 1
"""Exit code if a promise was broken."""


class Chaos(ToolCommand):
    """Strike a command with disasters drawn from a seed: cairn chaos -- sft @ my.toml --ckpt.interval 5

    The command after -- is sft, rl, dpo or reward with any flags; it needs --ckpt.interval and should take
    about a minute. Without one, short runs of configs/reverse_text alternate, in a clone. The exit code is 1
    if a promise was broken; the folders of such runs are kept. docs/how-to/chaos.md says what is done.
    """

    command: ClassVar[str] = "cairn chaos"
    seed: int = Field(default=0, ge=0)
    """Seed of the disasters: run I of a seed always meets the same."""
    runs: int = Field(default=1, ge=1)
    """Number of runs."""
    first: int = Field(default=0, ge=0)
    """Number of the first run."""
    jobs: int = Field(default=1, ge=1)
    """Runs at a time."""
    faults: str | None = None
    """What strikes each run, instead of drawn disasters, such as save.copy:kill@2#1,commit.done:kill."""
    folder: Path | None = None
    """Folder for the runs (default: a temporary one)."""
    prove: bool = True
    """Take the last steps of each run again, and compare weights and moments to the bit."""
    page: Path | None = Path("outputs/chaos.md")
    """What was struck, lost and spent, as a page."""

    def execute(self, disturbed: tuple[str, ...] = ()) -> int:
        """Run the campaign.

        Args:
            disturbed: the command to disturb.

        Raises:
            UsageError: it can't be disturbed.
            CairnError: it fails even undisturbed.
        """
        from cairn.tools.chaos.campaign import (  # imports numpy, which --help has no time for
            Campaign,
            Options,
        )

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores SIGINT
        if not disturbed and not Path(CONFIGS).is_dir():
            raise UsageError(
                f"cairn chaos: give the command to disturb after --, such as -- {COMMANDS[0]} @ my.toml "
                f"--max-steps 30 --ckpt.interval 5 (without one, {CONFIGS} of a clone is run)"
            )
        if disturbed and self.jobs > 1 and "inference-url" in " ".join(disturbed):
            raise UsageError(f"--jobs {self.jobs}: a server serves only one run at a time")
        faults = tuple(self.faults.split(",")) if self.faults else ()
        folder = None if self.folder is None else os.fspath(self.folder)
        options = Options(
            self.seed, self.runs, self.first, self.jobs, folder, disturbed, faults, prove=self.prove
        )
        summary = Campaign(options).run()
        if self.page is not None:
            make_folders(self.page.absolute().parent)
            write_atomic(self.page, page_of(summary, disturbed).encode())
        if self.as_json:
            print(json.dumps(summary), flush=True)
        else:
            for line in in_words(summary):
                print(line)
            if self.page is not None:
                print(f"written to {self.page}")
        return VIOLATED if summary["violations"] else 0


def in_words(summary: dict[str, Any]) -> list[str]:
    """What a campaign has found, in sentences."""
    runs, struck, broken = summary["runs"], sum(summary["kills"].values()), len(summary["violations"])
    said = [
        f"{counted(runs, 'run')}, {counted(struck, 'disaster')} ({summary['missed']} came too late), "
        f"{counted(broken, 'violation')}"
    ]
    if not broken:
        said.append("nothing was lost: audits, checkpoints and bits are those of undisturbed runs")
    if proved := summary["proved"]:
        said.append(f"{proved} steps were taken again, and gave the same weights and moments to the bit")
    steps, most = summary["recomputed"]["mean"], summary["recomputed"]["max"]
    said.append(f"a return to a checkpoint cost {steps:.1f} steps on average, {most:g} at most")
    if summary["goodput"] is not None:
        said.append(f"goodput {summary['goodput']:g}: time from first to last step, undisturbed by disturbed")
    return said


def page_of(summary: dict[str, Any], disturbed: tuple[str, ...]) -> str:
    """The page of a campaign, as Markdown."""
    what = f"`{shlex.join(disturbed)}`" if disturbed else f"short runs of `{CONFIGS}`"
    lines = [f"# Chaos, seed {summary['seed']}", "", f"Of {what}, in {summary['seconds']:g} s.", ""]
    lines += [f"- {line}" for line in in_words(summary)]
    columns = ("run", "command", "disasters", "goodput", "recomputed", "outcome")
    rows: list[tuple[Any, ...]] = [columns, ("---",) * len(columns)]
    for run in summary["each"]:
        goodput = "" if run["goodput"] is None else f"{run['goodput']:.2f}"
        recomputed = ", ".join(map(str, run["recomputed"])) or "0"
        outcome = "<br>".join(run["violations"]) or "kept its promises"
        disasters = "<br>".join(run["disasters"]) or "none"
        rows.append((run["run"], run["command"], disasters, goodput, recomputed, outcome))
    return "\n".join([*lines, "", *map(_row, rows), ""])


def _row(cells: tuple[Any, ...]) -> str:
    shown = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(shown)} |"


def run() -> int:
    """Run the command; returns the exit code."""
    argv = sys.argv[1:]
    at = argv.index("--") if "--" in argv else len(argv)
    return load(Chaos, argv[:at]).execute(tuple(argv[at + 1 :]))
