"""A worker process of a Ray cluster started by `local.py`; an actor will run in it.

By default Ray first runs a script that prepares a runtime environment, which Cairn's workers don't have. That
script imports Ray, and then starts a new Python, which imports Ray again.

With the arguments of a worker it lets a process that waits be the worker, if there is one; such a process has
the arguments of `waiting.wait`.
"""

import runpy
import sys

from cairn.launch.ray.waiting import WAIT, hand_over, wait

OF_THE_SCRIPT = ("--language=", "--serialized-runtime-env-context=")

if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith(OF_THE_SCRIPT)]
    if arguments[0] == WAIT:
        arguments = wait(int(arguments[1]), int(arguments[2]), arguments[3])
    elif hand_over(arguments):
        sys.exit()
    sys.argv[1:] = arguments
    runpy.run_module("ray._private.workers.default_worker", run_name="__main__")
