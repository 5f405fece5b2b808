"""A run's recipe: the settings and inputs that determine what it computes, and how two recipes differ.

Settings are named one by one: what is not in these lists says where, how fast or how long a run goes. The
recipe lies in the run directory (`recipe.json`) and in each checkpoint (`trainer/state.json`, and the
orchestrator's part in `orchestrator/state.json`), with every change that was made to it on the way.
"""

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from cairn.run.errors import UsageError
from cairn.run.extensions import code_of

Settings = Mapping[str, str | None]

TRAINER: Settings = {
    "seed": None,
    "seq_len": None,
    "micro_batch_size": None,
    "optimizer": None,
    "scheduler": None,
    "spike": None,
    "ckpt.interval": None,
    "precision": None,
    "attention": None,
    "activation_checkpointing": None,
    "state_on": None,
    "freeze": None,
    "lora.dropout": None,
    "router_aux_coef": None,
    "compile": None,
    "deterministic": None,
    "publish_dtype": None,
    "loss": None,
    "updates_per_batch": None,
    "mini_batches": None,
    **{
        f"critic.{name}": None
        for name in ("optimizer", "scheduler", "warmup_steps", "clip", "gamma", "gae_lambda", "whiten")
    },
    "kl": None,
    "distill": None,
    "data.batch_size": "batch_size",
    "data.shuffle": "shuffle",
    "data.shuffle_block": None,
    "data.learn": None,
    "data.too_long": None,
}
"""The trainer's settings (a section stands for all that is in it). One that a promise depends on, such as
that each record of an epoch is trained on once, has a name by which the user may accept another value."""
EARLIER_NAMES = {"loss.correction": "loss.type"}
"""What settings were called in recipes of earlier runs, and what they are called now."""
EARLIER_VALUES = {"loss.type": {"clip": "ppo_clip", "truncate": "cispo", "mask": "icepop"}}
"""By setting, what values were called in recipes of earlier runs, and what they are called now."""
ORCHESTRATOR: Settings = {
    "environment.code": None,
    "environment.label": None,
    "environment": "environment",
    "sampling": None,
    "tool_parser": None,
    "reasoning_parser": None,
    "prompts_per_step": "prompts_per_step",
    "samples_per_prompt": "samples_per_prompt",
    "redraw": None,
    "max_off_policy_steps": None,
    "recompute_kv_cache": None,
    "advantage": None,
    "overlong": None,
    "pools": None,
}
"""The orchestrator's, likewise."""
OF_ENVIRONMENT: Settings = {
    name: ORCHESTRATOR[name]
    for name in (
        *("environment.code", "environment.label", "environment"),
        *("samples_per_prompt", "advantage", "overlong", "pools"),
    )
} | {"sampling.max_tokens": None}
"""Those of the orchestrator's settings that each of several environments has for itself."""

OWN_CLASSES = {
    "loss": "type",
    "environment": "name",
    "advantage": "type",
    "optimizer": "type",
    "critic.optimizer": "type",
}
"""Sections that may name a class of the user's own, and the setting that does. A digest of the class's code
stands in the recipe as the section's `code`: an edit of it is printed, and breaks no promise."""

ARGUMENTS = ("environment.args", "advantage.args", "loss.args", "optimizer.args", "critic.optimizer.args")
"""Tables with keys of the user's choice, each of which is compared as a whole."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "*.model",
)
"""What a Hugging Face directory holds of the tokenizer and its chat template."""
NOT_ARCHITECTURE = {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache"}
"""What config.json says beside the model's architecture."""


@dataclass(frozen=True)
class Change:
    """A difference between the recipe of a checkpoint and that of the run that goes on from it.

    accept: what `--ckpt.accept-changes` calls it, where going on needs that; else None.
    """

    name: str
    was: Any
    now: Any
    accept: str | None = None

    def at(self, step: int, accepted: bool) -> dict[str, Any]:
        """As it is kept in all later checkpoints; `step` is the last one with the recipe of before."""
        about = asdict(self)
        del about["accept"]
        return {"step": step, **about, "accepted": accepted}


def settings_of(config: Mapping[str, Any], allowed: Settings) -> dict[str, Any]:
    """The settings of a dumped configuration that belong to the recipe, by dotted name.

    A schedule's end is where it ends, whether that is `scheduler.steps` or the run's `max_steps`. The
    interval of checkpoints belongs to it where a spike goes back to one of them.
    """
    flat: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Mapping) and name not in ARGUMENTS:
            for key, inner in cast(Mapping[str, Any], value).items():
                walk(inner, f"{name}.{key}" if name else key)
        else:
            flat[name] = json.loads(json.dumps(value, default=str))

    walk(config, "")
    for schedule in ("scheduler", "critic.scheduler"):
        if flat.get(f"{schedule}.type") == "constant":
            flat.pop(f"{schedule}.steps", None)
        elif flat.get(f"{schedule}.steps", 0) is None:
            flat[f"{schedule}.steps"] = config.get("max_steps")
            if flat[f"{schedule}.steps"] is None:
                del flat[f"{schedule}.steps"]
    if flat.get("spike.on_spike") != "rewind":
        flat.pop("ckpt.interval", None)
    return {name: value for name, value in flat.items() if is_setting(name, allowed)}


def is_setting(name: str, allowed: Settings) -> bool:
    """Whether a setting of this dotted name is one of these, or in one of these sections."""
    return any(_covers(key, name) for key in allowed)


def code_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the code of the user's own classes that settings name, as more settings."""
    codes = {
        f"{section}.code": code_of(str(settings.get(f"{section}.{key}", "")))
        for section, key in OWN_CLASSES.items()
    }
    return {name: code for name, code in codes.items() if code is not None}


def _covers(key: str, name: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any], allowed: Settings) -> list[Change]:
    """The settings that both recipes have, with different values."""
    saved = _with_whole_tables({EARLIER_NAMES.get(name, name): value for name, value in saved.items()})
    for name, values in EARLIER_VALUES.items():
        if name in saved:
            saved = {**saved, name: values.get(saved[name], saved[name])}
    return [
        Change(name, saved[name], now[name], next(allowed[key] for key in allowed if _covers(key, name)))
        for name in now
        if name in saved and saved[name] != now[name] and not _is_of_another(name, saved, now)
    ]


def _with_whole_tables(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of earlier runs, which kept some tables of arguments key by key."""
    whole: dict[str, Any] = {}
    for name, value in saved.items():
        table = next((table for table in ARGUMENTS if name.startswith(f"{table}.")), None)
        if table is None:
            whole[name] = value
            continue
        inner = whole.setdefault(table, {})
        *above, key = name.removeprefix(f"{table}.").split(".")
        for section in above:
            inner = inner.setdefault(section, {})
        inner[key] = value
    return whole


def _is_of_another(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a digest of code is that of another class than before, which its name says already."""
    section, _, key = name.rpartition(".")
    chosen_by = f"{section}.{OWN_CLASSES.get(section)}"
    return key == "code" and saved.get(chosen_by) != now.get(chosen_by)


def check_accepted(
    changes: Collection[Change], accepted: Collection[str], checkpoint: Path, flags: str = "--"
) -> None:
    """See that the user accepts all changes that break a promise.

    Args:
        accepted: what `--ckpt.accept-changes` names.
        flags: what the flags of these settings begin with.

    Raises:
        UsageError: naming those that are not accepted, with both values.
    """
    refused = [(change, change.accept) for change in changes if change.accept]
    refused = [(change, name) for change, name in refused if name not in accepted]
    if refused:
        names = ",".join(dict.fromkeys(name for _, name in refused))
        lines = "\n".join(f"  {in_words(change, flags)}" for change, _ in refused)
        raise UsageError(
            f"{checkpoint} was made with another recipe, and going on with this one would break what is "
            f"promised of the run (what was there -> what is here):\n{lines}\nGive what was there, or accept "
            f"it with --ckpt.accept-changes {names}; all later checkpoints then say so"
        )


def in_words(change: Change, flags: str = "--") -> str:
    """A change for people, on one line."""
    section, _, key = change.name.rpartition(".")
    if key == "code":
        return f"{flags}{section}: the code of the class was edited ({change.was[:12]} -> {change.now[:12]})"
    show = short_identity if change.name in ("data", "environment") else json.dumps
    return f"{_setting(change, flags)}: {show(change.was)} -> {show(change.now)}"


def _setting(change: Change, flags: str) -> str:
    """Where the user has set it: a flag, or tables of the configuration, which have none."""
    if change.name != "data":
        return flags + change.name.replace("_", "-")
    if isinstance(change.now, Mapping) and "sets" in cast(Mapping[str, Any], change.now):
        return f"{flags.removeprefix('--')}data.sets"
    return f"{flags}data.name"


def short_identity(value: Mapping[str, Any] | str) -> str:
    """An identity for people: how many records or problems, and the beginning of a digest."""
    if isinstance(value, str):
        return value[:12]
    if sets := cast("list[Mapping[str, Any]] | None", value.get("sets")):
        return "; ".join(f"{one['label']} x {one['weight']:g}: {short_identity(one)}" for one in sets)
    if "stream" in value:
        return f"a stream ({value['stream'][:12]})"
    what = "records" if "records" in value else "problems"
    digests = value.get("digest") or value.get("first_and_last") or value.get("messages")
    if isinstance(digests, Mapping):
        by_count = cast(Mapping[str, str], digests)
        digests = by_count[max(by_count, key=int)]
    if parts := cast("list[Mapping[str, Any]] | None", value.get("environments")):
        return "; ".join(f"{part['label']} x {part['weight']:g}: {short_identity(part)}" for part in parts)
    own = f", {value['own']}" if "own" in value else ""
    return f"{value[what]} {what}{own} ({digests[:12] if digests else 'content unknown'})"


# Identities


def tokenizer_of(folder: Path) -> str:
    """Names the tokenizer and chat template of a Hugging Face directory: a digest of their files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in _tokenizer_files(folder):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _tokenizer_files(folder: Path) -> list[Path]:
    return sorted(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern))


def model_of(folder: Path) -> str:
    """Names the architecture of a Hugging Face directory."""
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in NOT_ARCHITECTURE}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()


def base_of(folder: Path) -> str:
    """The name of the model in a Hugging Face directory: the hub's if it is from there, else the folder's."""
    for part in folder.absolute().parts:
        if match := re.fullmatch(r"models--([\w.-]+?)--([\w.-]+)", part):  # the hub's cache
            return "/".join(match.groups())
    return folder.name


# The date


def prints_date(folder: Path) -> bool:
    """Whether the chat template in a Hugging Face directory asks for today's date."""
    files = [path for path in _tokenizer_files(folder) if path.name.startswith(("chat_", "tokenizer_config"))]
    return any(b"strftime_now" in path.read_bytes() for path in files)


def now() -> str:
    """The time, as recipes have it."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def template_arguments(recipe: Mapping[str, Any] | None) -> dict[str, Callable[[str], str]]:
    """What a chat template gets beside the messages: where it prints the date, that of the run's start.

    So the same conversation has the same tokens on every day.
    """
    date = (recipe or {}).get("date")
    return {"strftime_now": datetime.datetime.fromisoformat(date).strftime} if date else {}
