"""A process that computes shares of passes for the service: `python -m cairn.service.helper_process`.

Its arguments are the descriptor of a socket to the service, the file for its heartbeats, and the service's
process, with which it dies. The service says first what to compute with, and then sends one share after the
other.
"""

import socket
import sys
from pathlib import Path

from cairn.config.service import ServiceConfig
from cairn.run import heartbeat
from cairn.run.exits import answer
from cairn.run.faults import fault_point
from cairn.run.processes import die_with
from cairn.service.helpers import PassHelpers
from cairn.service.shares import WEIGHTS_OF, PassShare, named, receive, send
from cairn.service.trainees import AdapterBase, ClientModel, one_rank


def main(descriptor: str, beats: str, parent: str) -> int:
    """Compute shares until the service sends no more; returns the exit code."""
    die_with(int(parent))
    heartbeat.start(Path(beats))
    with socket.socket(fileno=int(descriptor)) as service:
        first = receive(service)
        assert first is not None, "the service says first what to compute with"
        config = ServiceConfig.model_validate_json(first[0]["config"]).model_copy(update={"workers": 1})
        heartbeat.doing("reading the base", lengthy=True)
        folder = Path(first[0]["folder"])
        with one_rank(config, first[0]["number"]) as group, PassHelpers(config, folder) as nobody:
            base = AdapterBase(config, folder, group, nobody)
            send(service, {"base": base.digest}, {})
            models: dict[str, ClientModel] = {}
            while True:
                heartbeat.doing("waiting for a share", waiting=True)
                if (found := receive(service)) is None:
                    return 0
                heartbeat.doing("computing a share", lengthy=True)
                about, tensors = found
                kind = str(sorted(about["lora"].items()))
                if kind not in models:
                    models[kind] = base.make(about["lora"])
                if weights := named(tensors, WEIGHTS_OF):
                    models[kind].take(weights)
                fault_point("service.share")
                send(service, *models[kind].compute_share(PassShare.of(about, tensors)).message())


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(answer(lambda: main(*arguments)))
