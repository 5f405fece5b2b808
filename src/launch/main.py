"""The commands: each parses argv into a configuration, runs it, and returns an exit code (`exits.py`).

`main` is the command `cairn`, which takes any of them as its first argument.

Heavy modules are imported after the command line is parsed, so that --help answers at once.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.config.cli import COMMANDS, load, load_branches, require
from cairn.config.rl import RLConfig
from cairn.config.service import ServiceConfig
from cairn.config.shared import SlurmConfig, ToolCommand
from cairn.run.errors import UsageError, one_of
from cairn.run.exits import EXIT_STOPPED, answer
from cairn.run.output import importing, saying

if TYPE_CHECKING:
    from cairn.launch.slurm.job import JobBranches


def sft() -> int:
    """`sft @ sft.toml`: supervised fine-tuning."""
    return _start("sft")


def dpo() -> int:
    """`dpo @ dpo.toml`: learning from preferences."""
    return _start("dpo")


def reward() -> int:
    """`reward @ reward.toml`: training a reward model."""
    return _start("reward")


def rl() -> int:
    """`rl --trainer @train.toml --orchestrator @orch.toml`: a complete RL run."""

    def run() -> int:
        config = load(RLConfig, sys.argv[1:])
        if not config.branch:
            return _begin("rl", config)
        each = load_branches(RLConfig, sys.argv[1:], config.branch)
        with saying("importing PyTorch and Ray"), importing():
            from cairn.launch.branches.settings import refuse
            from cairn.launch.branches.turns import run_branches
            from cairn.launch.slurm.job import JobBranches
        if config.slurm is None:
            return run_branches(config, each)
        refuse(config, each)
        return _submit("rl", config, config.slurm, JobBranches.of(config, each, config.slurm))

    return answer(run, stopped=EXIT_STOPPED)


def trainer() -> int:
    """`trainer @ train.toml`: only the trainer of an RL run, for several machines."""
    return _start("trainer")


def orchestrator() -> int:
    """`orchestrator @ orch.toml`: only the orchestrator of an RL run, for several machines."""
    return _start("orchestrator")


def inference() -> int:
    """`inference @ infer.toml`: a vLLM server that outlives runs."""
    return _start("inference", stopped=0)


def service() -> int:
    """`service @ service.toml`: the Tinker API, for clients that train adapters side by side."""

    def run() -> int:
        config = load(ServiceConfig, sys.argv[1:])
        if config.dry_run:
            print(config.model_dump_json(indent=2), flush=True)
            return 0
        require(config, "model.name")
        with saying("importing PyTorch and vLLM's client"), importing():
            from cairn.launch.plan.model import resolve_model
            from cairn.service.command import serve
        return serve(config, Path(resolve_model(config.model)))

    return answer(run, stopped=0)


def eval() -> int:
    """`eval @ eval.toml --model.name step_N`: evaluate steps of a run, or any models."""
    return _start("eval")


def _start(command: str, stopped: int = EXIT_STOPPED) -> int:
    """Read the command line of a command with a plan, and start it. `stopped`: its exit code after Ctrl-C."""

    return answer(lambda: _begin(command, load(COMMANDS[command], sys.argv[1:])), stopped=stopped)


def _begin(command: str, config: Any) -> int:
    """Start a command with these settings; returns its exit code."""
    slurm: SlurmConfig | None = getattr(config, "slurm", None)
    if slurm is not None:
        return _submit(command, config, slurm)
    if config.dry_run:
        with saying("reading the configuration of the model, the machine and the data"):
            from cairn.launch.commands import start

            return start(command, config)
    with saying("importing PyTorch and Ray"), importing():
        from cairn.launch.commands import start
    return start(command, config)


def _submit(command: str, config: Any, slurm: SlurmConfig, branches: "JobBranches | None" = None) -> int:
    """`--slurm`: hand the run to Slurm; with --dry-run, print the job's script instead."""
    from cairn.config.kinds import KINDS
    from cairn.launch.slurm.job import job_of, submit

    require(config, *KINDS[command].needs)
    job = job_of(command, config, slurm, branches)
    if config.dry_run:
        print(job.contents[job.script.name], end="", flush=True)
    else:
        submit(job)
    return 0


def _tool(find: Callable[[], type[ToolCommand] | Callable[[], int]]) -> Callable[[], int]:
    """The command that `find` imports: its class, or what returns the exit code."""

    def run() -> int:
        found = find()
        return load(found, sys.argv[1:]).execute() if isinstance(found, type) else found()

    @functools.wraps(find)
    def command() -> int:
        return answer(run)

    return command


def _one_of(command: str, about: str, each: Mapping[str, type[ToolCommand]]) -> int:
    """`COMMAND NAME ...`: run the one of that name; returns the exit code."""
    name, *argv = sys.argv[1:] or [""]
    if name in each:
        return load(each[name], argv).execute()
    return _list(command, name, about, {name: one.__doc__ or "" for name, one in each.items()})


def _list(command: str, name: str, about: str, each: Mapping[str, str], more: str = "") -> int:
    """Answer a name that is none of a command's own: --help lists these; returns the exit code.

    Args:
        each: what each of them does, by its name.

    Raises:
        UsageError: there is no such one.
    """
    if name not in ("-h", "--help"):
        what = f"{command} {name}: there is no such command{one_of(name, each)}" if name else "give a command"
        raise UsageError(f"{what}; {command} --help lists them")
    width = max(map(len, each)) + 2
    print(f"usage: {command} COMMAND ...\n\n{about}\n")
    for one, does in each.items():
        print(f"  {one:<{width}}{next(iter(does.splitlines()), '')}")
    print(f"\n{command} COMMAND --help shows what a command takes{more}.")
    return 0


@_tool
def ckpt() -> Callable[[], int]:
    """`ckpt list|show|verify|audit ... PATH`: inspect and manage checkpoints and runs."""
    with saying("importing what reads checkpoints"):
        from cairn.tools.ckpt import COMMANDS
    return functools.partial(_one_of, "ckpt", "Inspect and manage the checkpoints of a run.", COMMANDS)


@_tool
def rollouts() -> type[ToolCommand]:
    """`rollouts RUN_DIR`: the answers that a run was trained on, in the terminal."""
    from cairn.tools.rollouts import Rollouts

    return Rollouts


@_tool
def runs() -> type[ToolCommand]:
    """`runs [FOLDER]`: all runs below a folder, and the command that goes on with each."""
    return _of_runs("runs")


@_tool
def watch() -> type[ToolCommand]:
    """`watch RUN`: a live view of a run, whoever has started it."""
    return _of_runs("watch")


@_tool
def diagnose() -> type[ToolCommand]:
    """`diagnose RUN`: what keeps a run from learning, in sentences."""
    return _of_runs("diagnose")


@_tool
def report() -> type[ToolCommand]:
    """`report RUN`: a run as one HTML file that needs nothing else."""
    return _of_runs("report")


@_tool
def dash() -> type[ToolCommand]:
    """`dash [FOLDER]`: a local web page of the runs below a folder."""
    with saying("importing what reads runs"):
        from cairn.watch.page.command import ServeDash
    return ServeDash


@_tool
def branches() -> type[ToolCommand]:
    """`branches FOLDER`: the branches of a run (rl --branch), and how they compare; ends one of them."""
    with saying("importing what reads runs"):
        from cairn.tools.branches import ListBranches
    return ListBranches


def _of_runs(name: str) -> type[ToolCommand]:
    """A command that only reads run directories."""
    with saying("importing what reads runs"):
        from cairn.watch.commands import COMMANDS
    return COMMANDS[name]


@_tool
def new() -> type[ToolCommand]:
    """`new NAME`: write a small project with an environment, its test and settings, ready to run."""
    from cairn.tools.new import New

    return New


@_tool
def env() -> Callable[[], int]:
    """`env try NAME`: what an environment asks, and what its reward gives for your answers."""
    with saying("importing what asks environments"):
        from cairn.tools.env import Try
    return functools.partial(_one_of, "cairn env", "Look at environments, without a run.", {"try": Try})


@_tool
def chat() -> Callable[[], int]:
    """`chat STEP`: talk to a checkpoint."""
    with saying("importing what starts servers"), importing():
        from cairn.evaluate.chat import run
        from cairn.launch.plan.evaluation import policy_to_serve
    return functools.partial(run, policy_to_serve)


@_tool
def chaos() -> Callable[[], int]:
    """`chaos -- sft @ my.toml`: kill your own run at random moments, and check that nothing was lost."""
    from cairn.tools.chaos.command import run

    return run


# The command `cairn`


EACH: dict[str, Callable[[], int]] = {
    command.__name__: command
    for command in (
        *(new, sft, dpo, reward, rl, eval, chat, env),
        *(inference, service, trainer, orchestrator),
        *(runs, watch, dash, diagnose, report, rollouts, branches, ckpt, chaos),
    )
}
"""All commands by name, in the order of `cairn --help`."""


def main() -> int:
    """`cairn COMMAND ...`: any command, under one name."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in EACH:
        sys.argv = sys.argv[1:]  # the command finds its arguments, and notes its name, as without `cairn`
        return EACH[name]()
    about = "Post-training for language models that never loses its place."
    each = {one: (does.__doc__ or "").partition("`: ")[2].rstrip(".") for one, does in EACH.items()}
    return answer(lambda: _list("cairn", name, about, each, "; cairn --version, the version"))
