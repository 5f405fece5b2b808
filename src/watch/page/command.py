"""The command `dash`: serves the page of all runs below a folder until Ctrl-C."""

import contextlib
import errno
import json
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from cairn.config.shared import Place, ToolCommand
from cairn.run.errors import UsageError
from cairn.run.output import printable
from cairn.watch.commands import find_runs

if TYPE_CHECKING:
    from cairn.watch.page.api import RunApi

HOST = "127.0.0.1"
"""The page is for this machine; `ssh -L` brings it to another."""
PORT = 8265
"""Unless --port says another; if it is taken, the next free one."""
TRIED = 20


class ServeDash(ToolCommand):
    """Serve a local web page of all runs below a folder: curves, what is wrong, rollouts, checkpoints, logs.

    It prints the page's address, which holds a secret: only whoever has it, on this machine, can read. Ctrl-C
    ends it and leaves the runs alone. From another machine: ssh -L 8265:127.0.0.1:8265 THIS_MACHINE, and open
    the same address there.
    """

    command = "dash"
    positional = ("folder",)
    folder: Place = Path("outputs")
    """Where runs are looked for, or one run's --output-dir; or a URL that runs have as --ckpt.remote."""
    port: int | None = Field(default=None, ge=0, le=65535)
    """The port (default: 8265, or the next free one; 0: any free one)."""
    price: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The price of an hour of a run's machines, in any unit: its time and tokens are in money, too."""

    def execute(self) -> int:
        from cairn.watch.page.api import RunApi  # imports numpy and pyarrow, which --help has no time for

        if isinstance(self.folder, str):
            from cairn.remote.remote_runs import mirrored  # takes a while to import

            with mirrored(self.folder) as runs:
                runs.follow()
                return self._serve(RunApi(runs.folder, self.price, runs))
        if not self.folder.is_dir():
            raise UsageError(
                f"{self.folder}: there is no such folder; give one that holds output directories"
            )
        return self._serve(RunApi(self.folder, self.price))

    def _serve(self, api: "RunApi") -> int:
        import uvicorn

        from cairn.watch.page.server import make_app

        token = secrets.token_urlsafe(24)
        with contextlib.closing(listen(self.port)) as listener:
            address = f"http://{HOST}:{listener.getsockname()[1]}/{token}/"
            found = len(find_runs(api.folder))
            if self.as_json:
                print(json.dumps({"address": address, "runs": found}), flush=True)
            else:
                runs = f"{found} run{'' if found == 1 else 's'} in {printable(str(self.folder))}"
                print(f"{runs}; new ones appear by themselves. Ctrl-C ends this page.")
                print(address, flush=True)
            config = uvicorn.Config(
                make_app(api, token),
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
