"""Make questions for the largest of three numbers: python prepare.py OUT

The seed is fixed: all runs have the same problems, and the held-out ones are others.
"""

import json
import random
import sys
from pathlib import Path


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    draws = random.Random(0)
    problems = {tuple(draws.sample(range(10, 100), 3)): None for _ in range(1400)}
    made = list(problems)
    for name, some in {"train": made[:1200], "held_out": made[1200:1328]}.items():
        with (out / f"{name}.jsonl").open("w") as file:
            for a, b, c in some:
                prompt = f"Which number is the largest, {a}, {b} or {c}?"
                print(json.dumps({"prompt": prompt, "answer": str(max(a, b, c))}), file=file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
