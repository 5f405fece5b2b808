"""Make the files of the example task in configs/reverse_text: tokenizer, model configuration, demonstrations.

The files are committed; this script documents how they were made. The same seed makes the same files.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

from cairn.orchestrator.environments import ReverseText
from cairn.run.seeds import derive

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character and the newline, and six special ones."""
    characters = [*map(chr, range(32, 127)), "\n"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """A Qwen3 of about 600,000 parameters."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )


def demonstrations(count: int, seed: int) -> list[dict]:
    """Strings and their reversals; after every letter, an answer ends early with probability 0.2.

    So the model learns how to reverse a string but stops early, which reinforcement learning then corrects.
    """
    task = ReverseText(problems=count, seed=derive(seed, "demonstrations"))
    records = []
    for i in range(count):
        (user,) = task.messages(i)
        draw = random.Random(derive(seed, "sloppiness", i))
        answer = ""
        for letter in reversed(user["content"]):
            answer += letter
            if draw.random() < 0.2:
                break
        records.append({"messages": [user, {"role": "assistant", "content": answer}]})
    return records


def preferences(count: int, seed: int) -> list[dict]:
    """Strings, each with its reversal, which is chosen, and one that ends early, which is rejected."""
    task = ReverseText(problems=count, seed=derive(seed, "preferences"))
    records = []
    for i in range(count):
        (user,) = task.messages(i)
        answer = user["content"][::-1]
        end = random.Random(derive(seed, "early end", i)).randrange(min(1, len(answer) - 1), len(answer))
        texts = {"chosen": answer, "rejected": answer[:end]}
        answers = {name: [{"role": "assistant", "content": text}] for name, text in texts.items()}
        records.append({"prompt": [user], **answers})
    return records


def write_records(path: Path, records: list[dict]) -> None:
    """Write records, one a line."""
    with open(path, "w") as file:
        for record in records:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")


def write_task(
    description: str,
    folder: str,
    records: int,
    tokenizer: PreTrainedTokenizerFast,
    make_records: Callable[[int, int], list[dict]],
    make_pairs: Callable[[int, int], list[dict]] | None = None,
) -> None:
    """Write the files of a task, where and how many as the command line says.

    Args:
        description: of the command.
        folder: where to write, by default.
        records: number of demonstrations, by default.
        make_records: makes the demonstrations, given their number and a seed.
        make_pairs: likewise pairs of answers, of which there are an eighth as many.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, default=Path(folder), help="where to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the demonstrations")
    parser.add_argument("--records", type=int, default=records, help="number of demonstrations")
    arguments = parser.parse_args()
    model = arguments.folder / "model"
    tokenizer.save_pretrained(model)
    make_config(tokenizer).save_pretrained(model)
    GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(model)
    write_records(arguments.folder / "sft.jsonl", make_records(arguments.records, arguments.seed))
    if make_pairs is not None:
        write_records(arguments.folder / "pairs.jsonl", make_pairs(arguments.records // 8, arguments.seed))


if __name__ == "__main__":
    write_task(
        __doc__.splitlines()[0], "configs/reverse_text", 4096, make_tokenizer(), demonstrations, preferences
    )
