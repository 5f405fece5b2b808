"""The command `dash`: serves the page of all runs below a folder until Ctrl-C."""

import argparse
import contextlib
import errno
import secrets
import socket
import sys
from pathlib import Path

from cairn.run.errors import UsageError
from cairn.run.output import printable
from cairn.watch.commands import find_runs

HOST = "127.0.0.1"
"""The page is for this machine; `ssh -L` brings it to another."""
PORT = 8265
"""Unless --port says another; if it is taken, the next free one."""
TRIED = 20


def dash() -> int:
    """`dash [FOLDER]`: a local page of all runs below a folder."""
    parser = argparse.ArgumentParser(
        prog="dash",
        description="Serve a local web page of all runs below a folder: curves, what is wrong, every "
        "rollout, checkpoints, logs. It prints the page's address, which holds a secret: only whoever has "
        "it, on this machine, can read. It only reads; Ctrl-C ends it and leaves the runs alone.",
        epilog=f"From another machine: ssh -L {PORT}:{HOST}:{PORT} THIS_MACHINE, and open the same address "
        "there.",
    )
    where = "where runs are looked for, or one run's --output-dir (default: outputs)"
    parser.add_argument("folder", nargs="?", type=Path, default=Path("outputs"), metavar="FOLDER", help=where)
    port_of = f"the port of {HOST} (default: {PORT}, or the next free one; 0: any free one)"
    parser.add_argument("--port", type=int, metavar="N", help=port_of)
    arguments = parser.parse_args(sys.argv[1:])
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder; give one that holds output directories")
    if arguments.port is not None and not 0 <= arguments.port <= 65535:
        raise UsageError(f"--port {arguments.port}: a port is a number from 0 to 65535")

    import uvicorn

    from cairn.watch.page.server import make_app

    token = secrets.token_urlsafe(24)
    with contextlib.closing(listen(arguments.port)) as listener:
        port = listener.getsockname()[1]
        found = len(find_runs(folder))
        runs = f"{found} run{'' if found == 1 else 's'}"
        print(f"{runs} in {printable(folder)}; new ones appear by themselves. Ctrl-C ends this page.")
        print(f"http://{HOST}:{port}/{token}/", flush=True)
        config = uvicorn.Config(
            make_app(folder, token),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run([listener])
    return 0


def listen(port: int | None) -> socket.socket:
    """A socket that listens at this port of the machine itself.

    Args:
        port: None: `PORT`, or the first free one after it.

    Raises:
        UsageError: it is taken, or not allowed.
    """
    tried = range(PORT, PORT + TRIED) if port is None else [port]
    for one in tried:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, one))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise UsageError(f"--port {one}: can't be used ({error.strerror}); give another") from None
    if port is None:
        raise UsageError(f"the ports {PORT} to {PORT + TRIED - 1} of {HOST} are in use; give another --port")
    raise UsageError(f"--port {port}: is in use, perhaps by another dash; give another, or leave --port out")
