"""Make sums of two numbers: python prepare.py OUT

The seed is fixed: all runs have the same problems, and the held-out ones are others.
"""

import json
import random
import sys
from pathlib import Path


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(2, 40) for b in range(2, 40)]
    random.Random(0).shuffle(pairs)
    for name, some in {"train": pairs[:1200], "held_out": pairs[1200:1328]}.items():
        with (out / f"{name}.jsonl").open("w") as file:
            for a, b in some:
                print(json.dumps({"prompt": f"What is {a} + {b}?", "answer": str(a + b)}), file=file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
