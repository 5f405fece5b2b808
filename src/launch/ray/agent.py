"""Replaces Ray's two agents, which a raylet requires to start: sleeps until the raylet dies.

Run as a script that imports only the standard library, so that it starts in a moment.
"""

import ctypes
import signal

PR_SET_PDEATHSIG = 1

ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
while True:
    signal.pause()
