"""Make conversations of GSM8K: python prepare.py FOLDER-OR-NAME OUT

The source is a folder with train.jsonl and test.jsonl, or the hub's name, openai/gsm8k. The calculator's
marks (`<<48/2=24>>`) are left out of the answers.
"""

import json
import re
import sys
from pathlib import Path


def main(source: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        if Path(source).is_dir():
            records = [
                json.loads(line) for line in (Path(source) / f"{split}.jsonl").read_text().splitlines()
            ]
        else:
            from datasets import load_dataset

            records = [dict(record) for record in load_dataset(source, "main", split=split)]
        with (out / f"{split}.jsonl").open("w") as file:
            for record in records:
                answer = re.sub(r"<<.*?>>", "", record["answer"])
                messages = [
                    {"role": "user", "content": record["question"]},
                    {"role": "assistant", "content": answer},
                ]
                number = answer.rpartition("####")[2].strip().replace(",", "")
                print(
                    json.dumps({"messages": messages, "question": record["question"], "number": number}),
                    file=file,
                )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
