"""A process of a Ray cluster that `local_ray` has started, in which an actor will live.

Ray itself would first run a script that prepares a runtime environment, which none of our workers has: it
imports Ray, and then starts Python afresh, which imports Ray again.
"""

import runpy
import sys

OF_THE_SCRIPT = ("--language=", "--serialized-runtime-env-context=")

if __name__ == "__main__":
    sys.argv[1:] = [argument for argument in sys.argv[1:] if not argument.startswith(OF_THE_SCRIPT)]
    runpy.run_module("ray._private.workers.default_worker", run_name="__main__")
