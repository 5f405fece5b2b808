"""The commands. Each turns argv into a configuration, runs, and answers with an exit code.

0: done. 2: bad usage or configuration, before anything is touched. 75: stopped by a signal, with everything
saved that could be; run it again to go on. 1: anything else.

Heavy modules are imported after the command line has been read, so that --help answers at once.
"""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable

from cairn import __version__
from cairn.config.cli import load, require
from cairn.run.errors import CairnError, UsageError
from cairn.run.logs import printable
from cairn.run.signals import on_stop_signals, say

EXIT_USAGE = 2
EXIT_STOPPED = 75
EXIT_UNREAD = 128 + signal.SIGPIPE


def sft() -> int:
    """`sft @ sft.toml`: supervised fine-tuning."""
    from cairn.config.trainer import SFTConfig

    def run() -> int:
        config = load(SFTConfig, sys.argv[1:])
        require(config, "model.name", "data.name")
        from cairn.launch.commands import train

        return train(config)

    return answer(run, stopped=EXIT_STOPPED)


def trainer() -> int:
    """`trainer @ train.toml`: the trainer of an RL run alone, for multi-node."""
    from cairn.config.trainer import TrainerConfig

    def run() -> int:
        config = load(TrainerConfig, sys.argv[1:])
        require(config, "model.name")
        from cairn.launch.commands import train

        return train(config)

    return answer(run, stopped=EXIT_STOPPED)


def orchestrator() -> int:
    """`orchestrator @ orch.toml`: the orchestrator of an RL run alone, for multi-node."""
    from cairn.config.orchestrator import OrchestratorConfig

    def run() -> int:
        config = load(OrchestratorConfig, sys.argv[1:])
        from cairn.launch.commands import orchestrate

        return orchestrate(config)

    return answer(run, stopped=EXIT_STOPPED)


def inference() -> int:
    """`inference @ infer.toml`: the long-lived vLLM server."""
    from cairn.config.inference import InferenceConfig

    def run() -> int:
        config = load(InferenceConfig, sys.argv[1:])
        require(config, "model.name")
        from cairn.inference.server import run as serve
        from cairn.launch.model import resolve_model

        return serve(config, resolve_model(config.model))

    return answer(run, stopped=0)


def rl() -> int:
    """`rl --trainer @train.toml --orchestrator @orch.toml`: the whole RL run."""
    from cairn.config.rl import RLConfig

    def run() -> int:
        config = load(RLConfig, sys.argv[1:])
        require(config, "model.name")
        from cairn.launch.commands import reinforce

        return reinforce(config)

    return answer(run, stopped=EXIT_STOPPED)


def ckpt() -> int:
    """`ckpt list|show|verify|audit ... PATH`: look at checkpoints and runs."""

    def command() -> int:
        from cairn.tools.ckpt import run

        return run()

    return answer(command)


def answer(run: Callable[[], int], *, stopped: int | None = None) -> int:
    """Run a command; an error that a user can do something about is one message, not a traceback.

    With `stopped`, the exit code for that, a stop signal ends the command there and then, which does no harm
    before it has started anything; `run` handles signals in its own way from then on.
    """

    def stop(name: str) -> None:
        say(f"{name}: stopped before anything was under way; the same command starts again")
        os._exit(stopped)

    try:
        if sys.argv[1:] == ["--version"]:
            print(f"cairn {__version__}", flush=True)
            return 0
        with contextlib.nullcontext() if stopped is None else on_stop_signals(stop):
            code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads what we print, such as `head`, has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    except UsageError as error:
        return _complain(str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return _complain("interrupted", 1)
    except CairnError as error:
        return _complain(str(error), 1)
    except OSError as error:  # a full disk, a read-only one, a folder that is gone
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        where = "standard output" if error.filename is None else error.filename
        return _complain(f"{where}: {error.strerror}", 1)


def _complain(message: str, code: int) -> int:
    print(f"error: {printable(message)}", file=sys.stderr)
    return code
