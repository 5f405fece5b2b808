"""Chat templates in the styles of well-known model families, and tokenizers for them, made here."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from cairn.orchestrator.completion.chat import ChatFormat

QWEN2 = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You help.{% endif %}

# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role != 'system' %}<|im_start|>system
You help.<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not (loop.first and tools)) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}{% for call in m.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Inserts a system prompt; a call's white space is its own; neighbouring results of tools share a turn."""

_THINKING = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = m.reasoning_content if m.reasoning_content else
    (m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '') %}
{{- '<|im_start|>assistant\\n' }}
{%- if KEEP and thought %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- content }}
{%- for call in m.tool_calls %}{{ '\\n' if content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN3 = _THINKING.replace("KEEP", "loop.index0 > ns.last")
"""Drops the reasoning of answers before the last question."""
THINKING = _THINKING.replace("KEEP", "true")
"""Keeps all reasoning."""

DEEPSEEK = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|im_end|>
{%- else %}<|User|>{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|Assistant|><think>
{% endif %}"""
"""Begins the reasoning in the generation prompt, and drops it from every earlier answer."""

LLAMA3 = """{{- bos_token }}{% for m in messages %}<|start_header_id|>
{{- 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{% if m.tool_calls %}{% set call = m.tool_calls[0].function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
"""Strips white space, and drops the content beside a call."""

MISTRAL = """{{- bos_token }}{% set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ m.content }}[/INST]
{%- elif m.role == 'tool' -%}
[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif -%}
{%- set function = call.function %}
{"name": "{{ function.name }}", "arguments": {{ function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- endfor %}]</s>
{%- else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"""
"""No generation prompt; the tools stand before the last question; ids of calls are checked."""

GEMMA = """{{ bos_token }}{% for m in messages %}
{%- set role = 'model' if m.role == 'assistant' else 'user' %}<start_of_turn>{{ role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

GPT_OSS = """{% for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking and m.tool_calls %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- endif %}
{%- if m.tool_calls %}{% set function = m.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ function.name }}<|channel|>commentary<|message|>
{{- function.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""An answer ends with <|return|>, which becomes <|end|> in later turns."""

PLAIN = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
"""No end tokens at all."""

STOPS = {
    "qwen2": (QWEN2, ["<|im_end|>", "<|endoftext|>"]),
    "qwen3": (QWEN3, ["<|im_end|>", "<|endoftext|>"]),
    "thinking": (THINKING, ["<|im_end|>"]),
    "deepseek": (DEEPSEEK, ["<|im_end|>"]),
    "llama3": (LLAMA3, ["<|eot_id|>", "<|eom_id|>"]),
    "mistral": (MISTRAL, ["</s>"]),
    "gemma": (GEMMA, ["<end_of_turn>", "</s>"]),
    "gpt_oss": (GPT_OSS, ["<|return|>", "<|call|>"]),
    "plain": (PLAIN, ["<|im_end|>"]),
}
"""Each template, and the tokens that end its answers."""
SPECIAL = [
    *("<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|User|>", "<|Assistant|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<start_of_turn>"),
    *("<end_of_turn>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    "[/TOOL_RESULTS]",
]
ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
CORPUS = [
    "the quick brown fox jumps over the dog. what is the weather in paris? it is sunny today, 25 degrees",
    '{"name": "weather", "arguments": {"city": "Paris", "days": 3}} assistant user system tool analysis',
    "You help. Tools: <tool_response> the answer is 42, the other answer is 1234567890 \n\n thinking",
]


def write_chat(folder: Path, style: str, *, metaspace: bool = False) -> ChatFormat:
    """The chat format of a style, saved in the folder first.

    metaspace: split text as SentencePiece does, instead of bytes.
    """
    template, stops = STOPS[style]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_metaspace() if metaspace else _bytes(),
        bos_token="<s>",
        eos_token=stops[0],
        chat_template=template,
    )
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(stops)
    GenerationConfig(eos_token_id=ids).save_pretrained(folder)
    return ChatFormat(folder)


def _bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))


def _metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=600, special_tokens=pieces))


def _trained(tokenizer: Tokenizer, trainer: trainers.BpeTrainer) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return tokenizer
