"""A worker process of a Ray cluster started by `local.py`; an actor will run in it.

By default Ray first runs a script that prepares a runtime environment, which Cairn's workers don't have. That
script imports Ray, and then starts a new Python, which imports Ray again.
"""

import runpy
import sys

OF_THE_SCRIPT = ("--language=", "--serialized-runtime-env-context=")

if __name__ == "__main__":
    sys.argv[1:] = [argument for argument in sys.argv[1:] if not argument.startswith(OF_THE_SCRIPT)]
    runpy.run_module("ray._private.workers.default_worker", run_name="__main__")
