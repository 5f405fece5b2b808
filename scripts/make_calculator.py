"""Make the files of the example task in recipes/calculator: tokenizer, model configuration, demonstrations.

The files are committed; this script documents how they were made. The same seed makes the same files.
"""

import random

from make_reverse_text import write_task
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cairn.orchestrator.environments.calculator import Calculator
from cairn.run.seeds import derive

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<user>", "<assistant>", "<tool>"]
CALL = [
    "<tool_call>",
    '{"name": "',
    "calculate",
    '", "arguments": {"',
    "expression",
    '": "',
    '"}}',
    "</tool_call>",
]
"""What a call is made of, beside the expression."""
LEFT_OUT = "#$@^`|~\\"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% for call in message['tool_calls'] %}"
    """{{ '<tool_call>{"name": "' + call['function']['name'] + '", "arguments": ' }}"""
    "{{ call['function']['arguments'] | tojson }}{{ '}</tool_call>' }}"
    "{% endfor %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The tools are not shown: the demonstrations show how the only one is called."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character and each piece of a call.

    There are as many as in configs/reverse_text, so that a server for that model can be given this one, too.
    """
    characters = [character for character in map(chr, range(32, 127)) if character not in LEFT_OUT]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CALL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in CALL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>", "<tool>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def demonstrations(count: int, seed: int) -> list[dict]:
    """Conversations with the tool, by someone careless.

    Every second one answers without the tool, with a random number. The others call it, and may report fewer
    digits than it returned. So the model learns how a call is written; that it pays is left to RL.
    """
    task = Calculator(problems=count, seed=derive(seed, "demonstrations"))
    records = []
    for i in range(count):
        (user,) = task.messages(i)
        draw = random.Random(derive(seed, "carelessness", i))
        result = str(task.calculate(user["content"]))
        messages = [user]
        if draw.random() < 0.5:
            answer = str(draw.randrange(10 ** (len(result) - 1), 10 ** len(result)))
        else:
            function = {"name": "calculate", "arguments": {"expression": user["content"]}}
            call = {"type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": result})
            answer = result[: draw.randint(1, len(result))]
        records.append({"messages": [*messages, {"role": "assistant", "content": answer}]})
    return records


if __name__ == "__main__":
    write_task(__doc__.splitlines()[0], "recipes/calculator", 2048, make_tokenizer(), demonstrations)
