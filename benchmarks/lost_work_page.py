"""The page of what benchmarks/lost_work.py has measured."""

from collections.abc import Iterator, Mapping
from typing import Any

ABOUT = {
    "cairn": "Cairn, all processes killed",
    "cairn, worker": "Cairn, the trainer's worker killed",
    "cairn, worker, memory": "the same, with each step in memory",
    "trl": "TRL, its process killed",
}
TASKS = {"sft": "SFT", "rl": "RL"}
BUSY = 4.0
"""The mean number of processes that wanted a processor, from which others slowed the runs down."""


def page(report: Mapping[str, Any]) -> str:
    """docs/results/faults.md."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    where, versions, busy = report["machine"], report["versions"], report["load"] > BUSY
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "# What faults cost"
    yield ""
    yield (
        "The same schedule of SIGKILLs in the same training, with Cairn and with TRL, each with its own way "
        "to go on. This page is written by `benchmarks/lost_work.py` from [faults.json](faults.json)."
    )
    yield ""
    yield (
        f"Commit {report['commit']}, {where['cores']} cores of {where['processor']} "
        f"({where['instructions']}), load {report['load']:g}; {packages}. Kills are drawn from seed "
        f"{report['seed']}."
    )
    for name, task in report["tasks"].items():
        yield ""
        yield from _task(name, task)
    yield ""
    yield "## What the columns say"
    yield ""
    yield (
        "- *Steps again*: steps that were finished before a kill and had to be computed once more, because "
        "they came after the newest checkpoint."
    )
    yield (
        "- *Samples lost, twice*: of the samples that the last weights come from, beside the undisturbed "
        "run. In SFT they are the same ones if all losses are the same to the bit."
    )
    yield (
        "- *Answers again* (RL): answers that were complete, had their reward, and were made and rewarded "
        "once more. Those that were being sampled at the kill are not in it."
    )
    yield (
        "- *By hand*: two starts in a row ended with an error, and somebody had to remove the newest "
        "checkpoint. The time of the failed starts counts, and that of the person does not."
    )
    work = (
        "- *Processor seconds a kill*: how much more work all processes did than in the undisturbed run, for "
        "each kill: starting again, and the steps that were computed again."
    )
    if busy:
        work += (
            " On a machine as busy as this one was, the same start takes up to ten more or less, so a small "
            "number may be none."
        )
    yield work
    yield (
        "- *Seconds a kill*: how much longer the run took than the undisturbed one, from the end of the "
        "first step to the end of the last, for each kill."
    )
    ratio = (
        "- *ETTR* (effective training time ratio): the time of the undisturbed run as a share of the "
        "disturbed one's. It is low because these runs take seconds if undisturbed, and a kill comes every "
        "few of them: compare the rows, not the values with those of long runs."
    )
    if busy:
        ratio += (
            " The machine was busy with other work, more in some runs than in others; processor seconds "
            "depend on that less."
        )
    yield ratio
    yield ""
    yield "## What Cairn loses, and why"
    yield ""
    yield from _why(report["tasks"])
    if any(task["systems"].get("trl", {}).get("by_hand") for task in report["tasks"].values()):
        yield ""
        yield "## Why TRL needed help"
        yield ""
        yield (
            "Nothing says of a checkpoint of the transformers Trainer that it is complete, and the newest is "
            "that of the highest number. A kill in the middle of a save leaves a folder in which files are "
            "missing. Each start after that takes this folder and ends with an error, until somebody removes "
            "it. In Cairn a step exists only once its manifest does, which is written last; a resume passes "
            "over a folder without one."
        )
    yield ""
    yield "## OpenRLHF"
    yield ""
    yield (
        "There is no row of OpenRLHF. Version 0.11.2 requires flash-attn, which is built for CUDA; its RL "
        "asks for `torch.cuda.current_device()` without another choice (`trainer/ray/ppo_critic.py`, "
        "`trainer/ppo_utils/replay_buffer.py`), so it does not run on this machine. That was read in its "
        "package, installed without what it requires; no run was tried."
    )
    yield ""
    yield "## Repeat it"
    yield ""
    yield "```"
    yield "uv run --group bench python benchmarks/lost_work.py --out docs/results"
    yield "uv run --group bench python benchmarks/lost_work.py --tasks sft --seed 1"
    yield "```"
    yield ""
    yield (
        "The first command writes this page and takes ten minutes. Where something is killed is the "
        "same each time; seconds are not."
    )


def _task(name: str, task: Mapping[str, Any]) -> Iterator[str]:
    kills = ", ".join(f"{kill['step']}{' (saving)' if kill['saving'] else ''}" for kill in task["schedule"])
    yield f"## {TASKS[name]}"
    yield ""
    first = next(iter(task["systems"].values()))
    about = f"{task['steps']} steps, a checkpoint every {task['interval']}"
    if name == "rl":
        about += f", {first['answers']} answers"
    yield (
        f"{about}; killed after the steps {kills}. *Saving* means: while the step's checkpoint is being "
        "written, at a share of the save's time that is the same for all."
    )
    yield ""
    extra = ["answers again"] if name == "rl" else []
    head = ["", "kills", "steps again", "samples lost, twice", *extra, "last weights", "failed starts"]
    head += ["by hand", "processor seconds a kill", "seconds a kill", "ETTR"]
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for system, found in task["systems"].items():
        cells: list[object] = [ABOUT[system], found["kills"], found["steps_again"], _samples(found)]
        cells += [found["answers_again"]] if name == "rl" else []
        cells += ["the same bits" if found["same_weights"] else "**others**"]
        cells += [found["failed_starts"], found["by_hand"]]
        cells += [
            f"{found['processor_a_kill']:.0f}",
            f"{found['seconds_lost_a_kill']:.1f}",
            f"{found['ettr']:.2f}",
        ]
        yield f"| {' | '.join(map(str, cells))} |"


def _samples(found: Mapping[str, Any]) -> str:
    """Samples lost, and trained on twice; in SFT, by the losses."""
    if "lost" in found:
        return f"{found['lost']}, {found['twice']}"
    return "0, 0" if found["other_losses"] == 0 else f"{found['other_losses']} steps have other losses"


def _why(tasks: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "- **Steps after the newest checkpoint** are computed again, as everywhere. `ckpt.interval` says how "
        "many, and saving costs little ([Checkpoints](checkpoints.md)), so save often."
    )
    for name, task in tasks.items():
        ours, theirs = task["systems"].get("cairn"), task["systems"].get("trl")
        if ours and theirs:
            parts = "several processes, Ray among them"
            if name == "rl":
                parts += ", and a server, which TRL has not: it samples in the process that trains"
            failed = f" (with its {theirs['failed_starts']} failed starts)" if theirs["failed_starts"] else ""
            yield (
                f"- **Starting, {TASKS[name]}.** A kill of everything costs Cairn "
                f"{ours['processor_a_kill']:.0f} processor seconds, and TRL{failed} "
                f"{theirs['processor_a_kill']:.0f}. Cairn starts {parts}."
            )
        if ours and theirs and ours["steps_again"] > theirs["steps_again"]:
            yield (
                f"- **A save that is cut off, {TASKS[name]}.** Cairn computed {ours['steps_again']} steps "
                f"again, and TRL {theirs['steps_again']}: at the same share of a save's time, a kill found "
                "Cairn's step not committed yet, and TRL's files all there."
            )
        worker = task["systems"].get("cairn, worker")
        if ours and worker:
            yield (
                f"- **One worker, {TASKS[name]}.** If only the trainer's worker is killed, which is what a "
                "crash in a step comes to, the others stay: "
                f"{worker['seconds_lost_a_kill']:.0f} s and not {ours['seconds_lost_a_kill']:.0f} s a kill."
            )
        memory = task["systems"].get("cairn, worker, memory")
        if worker and memory:
            yield (
                f"- **Steps in memory, {TASKS[name]}.** The worker that takes over goes on from the step "
                f"before the kill: steps taken again are {memory['steps_again']} and not "
                f"{worker['steps_again']} ([steps in memory](../how-to/memory.md))."
            )
