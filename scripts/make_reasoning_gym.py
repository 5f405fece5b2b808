"""Make the demonstrations of the example task in recipes/spell_backward, words and their letters backward.

The file is committed; this script documents how it was made. The same seed makes the same file. It needs the
dependency group reasoning-gym.
"""

import argparse
import random
import tomllib
from pathlib import Path

from make_reverse_text import write_records

from cairn.orchestrator.environments.reasoning_tasks import ReasoningGym
from cairn.run.seeds import derive


def demonstrations(folder: Path, count: int, seed: int) -> list[dict]:
    """Questions of the task in rl.toml, and answers that end early.

    After every letter an answer ends with probability 0.3, so that few are whole: SFT learns from them in
    which order the letters come, and reinforcement learning that all of them are wanted.
    """
    args = tomllib.loads((folder / "rl.toml").read_text())["orchestrator"]["environment"]["args"]
    task = ReasoningGym(**args | {"size": count, "seed": derive(seed, "demonstrations") % 2**31})
    records = []
    for i in range(count):
        (user,) = task.messages(i)
        draw = random.Random(derive(seed, "early end", i))
        answer = ""
        for letter in reversed(user["content"].rpartition(": ")[2]):
            answer += letter
            if draw.random() < 0.3:
                break
        records.append({"messages": [user, {"role": "assistant", "content": answer}]})
    return records


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=Path("recipes/spell_backward"), help="has rl.toml; where to write"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the demonstrations")
    parser.add_argument("--records", type=int, default=4096, help="number of demonstrations")
    arguments = parser.parse_args()
    records = demonstrations(arguments.folder, arguments.records, arguments.seed)
    write_records(arguments.folder / "sft.jsonl", records)
