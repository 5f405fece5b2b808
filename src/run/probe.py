"""A few tokens and the trainer's logprobs of them: by these a server proves that it serves that policy."""

from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from cairn.run.files import read_json, write_json

FILE = "probe.json"
ROUNDING = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
"""How far apart server and trainer may be on average, per unit of 1 + |logprob|, by the coarser data type."""


@dataclass(frozen=True)
class Probe:
    """Token ids, and the logprob of each but the first under a policy, computed in `dtype`."""

    token_ids: list[int]
    logprobs: list[float]
    dtype: str

    def write(self, folder: Path) -> None:
        """Put it into the folder of the policy."""
        write_json(folder / FILE, asdict(self))

    def difference(self, logprobs: list[float], dtype: str) -> str | None:
        """How a server's logprobs of these tokens, or the first of them, differ; None: by rounding only."""
        apart = [abs(theirs - ours) for theirs, ours in zip(logprobs, self.logprobs, strict=False)]
        mean = sum(apart) / len(apart)
        allowed = max(ROUNDING.get(kind, 0.0) for kind in (dtype, self.dtype))
        allowed *= 1 + sum(map(abs, self.logprobs)) / len(apart)
        if mean <= allowed:  # and not NaN
            return None
        return f"by {mean:.2g} on average and {max(apart):.2g} at most, where rounding makes {allowed:.2g}"


def read_probe(folder: Path) -> Probe | None:
    """The probe in a policy's folder, or None if there is none."""
    content = read_json(folder / FILE)
    return None if content is None else TypeAdapter(Probe).validate_python(content)
