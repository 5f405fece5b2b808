"""`metrics.jsonl`: one row per optimiser step, each step once."""

import json

from cairn.run.files import write_atomic
from cairn.run.jsonlines import JsonLines


class MetricsLog(JsonLines):
    """The metrics of a run, in the order of steps; each row holds the key `step`."""

    def keep_through(self, step: int) -> int:
        """Drop the rows after `step`: the run goes on from there and writes them again. Returns how many."""
        if not self.path.exists():
            return 0
        rows = self.rows()
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= step]
        write_atomic(self.path, "".join(kept).encode())
        return len(rows) - len(kept)
