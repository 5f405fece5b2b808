"""Names of the files of DeepSpeed's checkpoints."""

import re

LATEST = ("latest", "latest_universal")
"""The files in which the engine, and its converter, name the newest checkpoint's folder."""
UNIVERSAL = "zero"
"""The folder of a universal checkpoint that holds a folder for each parameter."""
STATES = re.compile(
    r"(?:(?P<kind>bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_(?P<what>model|optim)_states\.pt"
)
"""The names of the files of an engine without pipeline and expert parallelism."""
