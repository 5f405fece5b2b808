"""The second tier: steps in an object store, behind the local ones.

Below the URL of a run lie

    run.json                 which run the prefix belongs to, and which attempt may write
    attempts/N.json          which machine's attempt has the number N
    step_N/...               the files of a step, exactly as in the local folder, with its manifest.json
    committed/step_N.json    that manifest again, put last: a step exists if and only if this object does
    run/...                  the run's metrics up to the newest step
    policies/...             an RL run's newest policies, with weight_transport = "store" (policy/stored.py)
    catalog.json             what lists of steps show; derived, and counts only for manifests that are there

so that a copy of `step_N/` by any tool is a checkpoint.
"""

from cairn.remote.client.objects import Objects
from cairn.remote.step_store import RemoteStore
from cairn.run.object_store import RemoteError

__all__ = ["Objects", "RemoteError", "RemoteStore"]
