"""Run a command that must not outlive the process that asked for it.

    python lifeline.py COMMAND ARG...

Runs as leader of a process group of its own, with a pipe from the owner as stdin. When the pipe closes (the
owner is gone, however it died) or the command ends, the whole group is killed, so that none of the command's
children is left behind. SIGTERM goes on to the command.
"""

import os
import signal
import subprocess
import sys
import threading


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the owner is asked as well, and decides
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: command.terminate())
    threading.Thread(target=_kill_group_when_owner_is_gone, daemon=True).start()
    command.wait()
    os.killpg(0, signal.SIGKILL)


def _kill_group_when_owner_is_gone() -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
