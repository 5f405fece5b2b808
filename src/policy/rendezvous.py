# torch.distributed exports no stores.
# pyright: reportPrivateImportUsage=false
"""A small key-value store, hosted by one process, in which others find it to exchange tensors."""

import socket

import torch.distributed as dist


def host_store(host: str, port: int = 0, world_size: int | None = None) -> dist.TCPStore:
    """Host a store on `host`, on a free port unless one is given; PyTorch's own would listen on every
    network.

    With `world_size`, it waits for that many clients.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    port = listening.getsockname()[1]
    wait = world_size is not None
    return dist.TCPStore(
        host, port, world_size, is_master=True, wait_for_workers=wait, master_listen_fd=listening.detach()
    )


def address_towards(host: str) -> str:
    """This machine's address on the network towards `host`, which is `host` itself if it is this machine's.

    Sends nothing.

    Raises:
        OSError: the name is unknown, or there is no way towards it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            probe.connect((host, 9))
        return probe.getsockname()[0]
