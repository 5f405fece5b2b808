# torch.distributed exports no stores.
# pyright: reportPrivateImportUsage=false
"""Where processes find each other to exchange tensors: a small key-value store that one of them hosts."""

import socket

import torch.distributed as dist


def host_store(host: str, port: int = 0, world_size: int | None = None) -> dist.TCPStore:
    """Host a store at `host`, on a free port unless told which; PyTorch's own would listen on every network.

    With a world size it waits for as many users.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    port = listening.getsockname()[1]
    wait = world_size is not None
    return dist.TCPStore(
        host, port, world_size, is_master=True, wait_for_workers=wait, master_listen_fd=listening.detach()
    )


def address_towards(host: str) -> str:
    """This machine's address on the network by which it reaches `host`; sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
