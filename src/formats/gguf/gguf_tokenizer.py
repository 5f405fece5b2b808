"""Tokenizers in GGUF files: their metadata, from tokenizer.json, and back.

Programs that run GGUF files know tokenizers by name, and split text by code of their own. A tokenizer is
written only if its definition is one that has such a name.
"""

# tokenizers and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.tensors.source import listed
from cairn.run.conversations import end_tokens

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = {"type": "Digits", "individual_digits": True}
PRE_TOKENIZERS: dict[str, tuple[str | None, bool, bool]] = {
    "qwen2": (_QWEN2, False, False),
    "qwen35": (_QWEN35, False, False),
    "llama-bpe": (_LLAMA3, False, True),
    "smaug-bpe": (_LLAMA3, False, False),
    "gpt-2": (None, False, False),
    "smollm": (None, True, False),
    "starcoder": (None, True, False),
    "refact": (None, True, False),
}
"""By the name that GGUF has for it: the pattern that splits text (None: that of GPT-2), whether each digit is
split off before, and whether a piece of text that is a token as a whole is taken without merges."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens in GGUF."""
SPACE = "\u2581"
"""Stands for a space in SentencePiece's tokens."""
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def tokenizer_metadata(folder: Path, size: int) -> dict[str, Any]:
    """The metadata of the tokenizer and chat template in a folder.

    Args:
        size: number of tokens that the model has; it may be more than the tokenizer's.

    Raises:
        CheckpointError: there is no tokenizer.json, or the tokenizer has no counterpart in GGUF.
    """
    from transformers import AutoTokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: has no tokenizer.json, which a GGUF file needs")
    definition = json.loads(path.read_text())
    added = {token["id"]: token for token in definition["added_tokens"]}
    if strips := [t["content"] for t in added.values() if t["lstrip"] or t["rstrip"] or t["single_word"]]:
        raise _refused(path, f"its tokens {listed(strips)} change the text around them")
    vocabulary: dict[str, int] = definition["model"].get("vocab") or {}
    if definition["model"]["type"] == "Unigram":
        raise _refused(
            path, "it is a Unigram model, and is not the tokenizer of a Llama, Qwen or Gemma model"
        )
    spelled = {number: token for token, number in vocabulary.items()}
    spelled |= {number: token["content"] for number, token in added.items()}
    if max(spelled) >= size:
        raise _refused(path, f"it has a token {max(spelled)}, and the model has {size} tokens")
    if (merges := _byte_level(path, definition)) is not None:
        kind: dict[str, Any] = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": _pre_tokenizer(path, definition),
            "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        }
    else:
        kind = _sentencepiece(path, definition, size)
        for number, token in spelled.items():  # what is added is found in text before spaces are replaced
            old, new = (SPACE, " ") if number in added else (" ", SPACE)
            spelled[number] = token.replace(old, new)
    unknown = definition["model"].get("unk_token")
    types: list[int] = []
    for number in range(size):
        token = spelled.get(number)
        if token is None:
            types.append(UNUSED)
        elif token == unknown and "tokenizer.ggml.scores" in kind:
            types.append(UNKNOWN)
        elif number in added:
            types.append(CONTROL if added[number]["special"] else USER_DEFINED)
        elif "tokenizer.ggml.scores" in kind and _is_byte(token):
            types.append(BYTE)
        else:
            types.append(NORMAL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    about = {
        **kind,
        "tokenizer.ggml.tokens": [spelled.get(number, f"[PAD{number}]") for number in range(size)],
        "tokenizer.ggml.token_type": types,
        **_special_tokens(path, tokenizer, folder),
    }
    if isinstance(tokenizer.chat_template, str):
        about["tokenizer.chat_template"] = tokenizer.chat_template
    elif tokenizer.chat_template:
        raise _refused(path, "it has several chat templates, and a GGUF file has one")
    return about


def write_tokenizer(values: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer that the metadata describes, the inverse of `tokenizer_metadata`.

    transformers' `convert_gguf_tokenizer` (5.19) makes another one: it has no NFC, does not take the whole
    pieces of Llama 3 without merges, does not split off SmolLM's digits, adds no tokens around a text, takes
    unused numbers for tokens, and drops special tokens with characters beyond the alphabet of bytes, such as
    DeepSeek's.

    Raises:
        CheckpointError: it is not a byte-level BPE with a name that is known.
        Damaged: tokens are missing, or invalid.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind, name = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if kind != "gpt2" or name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"the tokenizer (model {kind!r}, pre-tokenizer {name!r}) can't be made from the file's metadata; "
            "give the folder with config.json and tokenizer with --model FOLDER"
        )
    pattern, digits, whole_pieces = PRE_TOKENIZERS[name]
    try:
        tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
        vocabulary = {
            token: number
            for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (NORMAL, CONTROL, USER_DEFINED)
        }
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_pieces))  # pyright: ignore
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"the metadata describes no tokenizer: {error!r}") from None
    except Exception as error:  # tokenizers raises Exception itself where merges name unknown tokens
        raise Damaged(f"the metadata describes no tokenizer: {error}") from None
    if name.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    first: list[Any] = []
    if pattern is not None:
        first = [pre_tokenizers.Split(Regex(pattern), "isolated")]
    elif digits:
        first = [pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, by_bytes]) if first else by_bytes
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL)])
    ids = {key: values.get(f"tokenizer.ggml.{key}_token_id") for key in _SPECIAL}
    if strange := [key for key, number in ids.items() if number is not None and number >= len(tokens)]:
        raise Damaged(f"there is no token of the number that the metadata has for {listed(strange)}")
    special = {_SPECIAL[key]: tokens[number] for key, number in ids.items() if number is not None}
    begin = special.get("bos_token") if values.get("tokenizer.ggml.add_bos_token") else None
    end = special.get("eos_token") if values.get("tokenizer.ggml.add_eos_token") else None
    if begin or end:
        from tokenizers.processors import TemplateProcessing

        single = " ".join(piece for piece in (begin, "$A", end) if piece)
        known = [(token, tokenizer.token_to_id(token)) for token in (begin, end) if token]
        tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=known)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    made.chat_template = values.get("tokenizer.chat_template")
    made.save_pretrained(folder)


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: the tokenizer has no counterpart in GGUF: {why}")


def _byte_level(path: Path, definition: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """The merges of a byte-level BPE; None for another kind of tokenizer."""
    model = definition["model"]
    if model["type"] != "BPE" or not _mentions(definition["pre_tokenizer"], "ByteLevel"):
        return None
    if model.get("byte_fallback") or model.get("continuing_subword_prefix") or model.get("dropout"):
        raise _refused(path, "it is a byte-level BPE with byte fallback, prefixes or dropout")
    if definition["normalizer"] not in (None, {"type": "NFC"}):
        raise _refused(path, f"it changes text with {definition['normalizer']}")
    return _merges(model)


def _pre_tokenizer(path: Path, definition: Mapping[str, Any]) -> str:
    """GGUF's name of the way in which a byte-level BPE splits text."""
    found = definition["pre_tokenizer"]
    parts = found["pretokenizers"] if found["type"] == "Sequence" else [found]
    pattern = None
    if (
        len(parts) == 2
        and parts[0]["type"] == "Split"
        and (parts[0]["behavior"], parts[0]["invert"])
        == (
            "Isolated",
            False,
        )
    ):
        pattern = parts[0]["pattern"].get("Regex")
    bytes_alone = parts[-1]["type"] == "ByteLevel" and not parts[-1]["add_prefix_space"]
    digits = len(parts) == 2 and parts[0] == DIGITS
    by_gpt2 = (len(parts) == 1 or digits) and parts[-1].get("use_regex", True)
    by_pattern = pattern is not None and not parts[-1].get("use_regex", True)
    whole_pieces = bool(definition["model"].get("ignore_merges"))
    for name, known in PRE_TOKENIZERS.items():
        if bytes_alone and (by_gpt2 or by_pattern) and known == (pattern, digits, whole_pieces):
            return name
    raise _refused(
        path,
        f"no program knows how it splits text: pre_tokenizer {json.dumps(found)}, "
        f"ignore_merges {whole_pieces}",
    )


def _sentencepiece(path: Path, definition: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The metadata of a BPE with byte fallback, as made from SentencePiece's, or of one token a character.

    Programs merge what makes the token with the highest score, whatever its parts are. So the order of merges
    must be one of the tokens that they make, and have every pair of tokens whose text is a token.
    """
    model = definition["model"]
    vocabulary: dict[str, int] = model["vocab"]
    splits = definition["pre_tokenizer"]
    normalizer = definition["normalizer"]
    prefix = False
    if model["type"] == "WordLevel":
        if normalizer is not None or splits is None or splits.get("pattern") != {"String": ""}:
            raise _refused(path, "it has whole words as tokens")
        merges: list[tuple[str, str]] = []
        texts = {token.replace(" ", SPACE) for token in vocabulary}
    elif model["type"] == "BPE" and model.get("byte_fallback"):
        steps = normalizer["normalizers"] if _kind(normalizer) == "Sequence" else [normalizer]
        replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE} in steps
        prepends = {"type": "Prepend", "prepend": SPACE} in steps
        by_metaspace = _kind(splits) == "Metaspace" and splits.get("replacement") == SPACE
        if by_metaspace and normalizer is None and splits.get("split") is False:
            prefix = splits["prepend_scheme"] in ("always", "first")
        elif replaces and len(steps) == 1 + prepends and (splits is None or _keeps_spaces(splits)):
            prefix = prepends
        else:
            raise _refused(path, f"it changes and splits text by {json.dumps([normalizer, splits])}")
        merges, texts = _merges(model), set(vocabulary)
        if model.get("ignore_merges"):
            raise _refused(path, "it takes whole pieces of text as tokens without merges")
    else:
        raise _refused(path, f"it is a {model['type']} model that is neither byte-level nor SentencePiece's")
    order: dict[str, int] = {}
    previous = None
    for one, other in merges:
        if one + other != previous and one + other in order:
            raise _refused(path, f"its merges that make {one + other!r} do not follow each other")
        previous = one + other
        order.setdefault(previous, len(order))
    texts -= {token["content"] for token in definition["added_tokens"]}  # are cut out of the text before
    listed_pairs = set(merges)
    for token in texts:
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair[0] in texts and pair[1] in texts and pair not in listed_pairs and not _is_byte(token):
                raise _refused(
                    path, f"{pair[0]!r} and {pair[1]!r} are not merged, though {token!r} is a token"
                )
    spelled = {number: token for token, number in vocabulary.items()}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [-float(order.get(spelled.get(n, ""), len(order))) for n in range(size)],
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def _special_tokens(path: Path, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """The numbers of special tokens, and which of them begin and end a text."""
    ids = {key: getattr(tokenizer, f"{name}_id") for key, name in _SPECIAL.items()}
    about: dict[str, Any] = {f"tokenizer.ggml.{k}_token_id": n for k, n in ids.items() if n is not None}
    bare = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    options = {
        (begins, ends): [ids["bos"]] * begins + bare + [ids["eos"]] * ends
        for begins in (False, True)
        for ends in (False, True)
    }
    found = next((option for option, tokens in options.items() if tokens == whole), None)
    if found is None:
        raise _refused(path, f"it makes {whole} of the tokens {bare}")
    about |= {"tokenizer.ggml.add_bos_token": found[0], "tokenizer.ggml.add_eos_token": found[1]}
    others = [token_id for token_id in end_tokens(folder, None) if token_id != ids["eos"]]
    return about | ({"tokenizer.ggml.eot_token_id": others[0]} if others else {})


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs of a BPE; older files have them as strings."""
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return [(one, other) for one, other in pairs]


def _kind(part: Mapping[str, Any] | None) -> str | None:
    return part["type"] if part else None


def _keeps_spaces(splits: Mapping[str, Any]) -> bool:
    """Whether text is split at spaces, of which the normalizer has left none, as Gemma's tokenizer does."""
    return splits["type"] == "Split" and splits["pattern"] == {"String": " "}


def _mentions(part: Mapping[str, Any] | None, kind: str) -> bool:
    return part is not None and (
        part["type"] == kind or any(_mentions(inner, kind) for inner in part.get("pretokenizers", ()))
    )


def _is_byte(token: str) -> bool:
    """Whether it is a token such as <0x0A>."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
