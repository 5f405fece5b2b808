"""A worker of a raylet's that can wait, as `worker_process.py` is, but does nothing than say what it is."""

import json
import os
import sys

from cairn.launch.ray import waiting

waiting.MODULES = ("json",)

if sys.argv[1] == waiting.WAIT:
    arguments = waiting.wait(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
elif waiting.hand_over(sys.argv[1:]):
    sys.exit()
else:
    arguments = sys.argv[1:]
facts = {
    "waited": sys.argv[1] == waiting.WAIT,
    "arguments": arguments,
    "parent": os.getppid(),
    "folder": os.getcwd(),
    "session": os.getsid(0),
    "environment": dict(os.environ),
}
print(json.dumps(facts), flush=True)
