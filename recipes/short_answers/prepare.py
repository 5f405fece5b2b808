"""Make lists of five words, of which the last is to be said: python prepare.py OUT

The seed is fixed: all runs have the same problems. The words of the held-out ones are others.
"""

import json
import random
import sys
from pathlib import Path

TRAIN = (
    "horse cow dog cat sheep goat lion tiger bear wolf rabbit mouse eagle owl shark whale frog snake bee "
    "table river lamp stone house book chair window bottle hammer train bridge mountain cloud shirt spoon"
)
HELD_OUT = (
    "duck camel monkey deer pig donkey piano pencil ladder garden mirror basket carpet candle street tower"
)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    draws = random.Random(0)
    for name, words, count in (("train", TRAIN, 1200), ("held_out", HELD_OUT, 48)):
        with (out / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                listed = draws.sample(words.split(), 5)
                print(json.dumps({"prompt": ", ".join(listed), "answer": listed[-1]}), file=file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
