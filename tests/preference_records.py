"""Preference records that tests learn from: pairs, and single answers."""

import json
from pathlib import Path

from cairn.config.preferences import PreferenceDataConfig

ASKED = {"role": "user", "content": "abc"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("cba", "c"))


def write(path: Path, records: list[dict]) -> PreferenceDataConfig:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return PreferenceDataConfig(name=str(path), batch_size=4)


def pair_of(text: str, end: int = 1) -> dict:
    answers = {"chosen": text[::-1], "rejected": text[::-1][:end]}
    return {
        "prompt": [{"role": "user", "content": text}],
        **{name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()},
    }


PAIRS = [pair_of("abcdefgh"[: 2 + i % 7] + str(i)) for i in range(10)]


def labelled(text: str, answer: str, label: object) -> dict:
    return {"prompt": [{"role": "user", "content": text}], "completion": answer, "label": label}


EXAMPLES = [labelled("abcdefgh"[: 2 + i % 5] + str(i), "cba"[: 1 + i % 3], i % 3 > 0) for i in range(12)]
