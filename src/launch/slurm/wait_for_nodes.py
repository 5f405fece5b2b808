"""Wait until a Ray cluster has so many nodes: python -m ... HOST:PORT COUNT SECONDS."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import sys
import time

import ray


def main(address: str, count: int, seconds: float) -> None:
    """Return once the cluster at `address` has `count` living nodes; exit with 1 after `seconds`."""
    ray.init(address, log_to_driver=False)
    end = time.monotonic() + seconds
    while (found := sum(node["Alive"] for node in ray.nodes())) < count:
        if time.monotonic() > end:
            sys.exit(
                f"error: {found} of {count} nodes have joined Ray at {address} within {seconds:g} s; "
                "ray.start_timeout allows more"
            )
        time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
