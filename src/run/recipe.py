"""A run's recipe: the settings and inputs that determine what it computes, and how two recipes differ.

It has all settings of a role but those that are listed as free: these say where, how fast or how long a run
goes. So a setting that nobody has thought about is compared. The recipe lies in the run directory
(`recipe.json`) and in each checkpoint (`trainer/state.json`, and the orchestrator's part in
`orchestrator/state.json`), with every change that was made to it on the way.
"""

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from cairn.run.extensions import Group, code_of


@dataclass(frozen=True)
class Compared:
    """Which settings of a role are compared: all but the free ones. A section stands for all that is in it.

    free: what may differ. but: exceptions in free sections. consent: settings that a promise depends on, such
    as that each record of an epoch is trained on once, and the name by which the user may accept another
    value of each.
    """

    free: frozenset[str]
    but: frozenset[str] = frozenset()
    consent: Mapping[str, str] = field(default_factory=dict[str, str])

    def __contains__(self, name: str) -> bool:
        return is_within(name, self.but) or not is_within(name, self.free)

    def accept(self, name: str) -> str | None:
        """What `--ckpt.accept-changes` calls a change of this setting, if going on needs that."""
        return next((called for key, called in self.consent.items() if covers(key, name)), None)


OF_ANY_ROLE = (
    "model",  # whose architecture and tokenizer are compared by content, and whose weights are the step's
    *("dry_run", "machine", "output_dir", "max_steps", "stop_after", "ckpt", "self_check"),
    *("max_restarts", "heartbeat_timeout", "hang_timeout", "standby", "preemption", "colocated"),
    *("sinks", "log_format"),
)
TRAINER = Compared(
    free=frozenset(
        {
            *OF_ANY_ROLE,
            *("workers", "gpus", "replicas", "parallel", "spare_workers", "threads", "ray", "wandb", "slurm"),
            "keep_gathered",  # of which no bit depends
            *("micro_batch_size", "micro_batch_tokens"),  # of which, as of `workers`, only rounding does
            *(
                "weight_transport",
                "weight_encoding",
                "weight_host",
                "batch_timeout",
                "cut_rollouts",
                "keep_tokens_gb",
                "keep_batches_gb",
                "recorded_batches",
            ),
            # The records are compared by content, and so are those of validations.
            *("data.name", "data.split", "data.read", "data.sets", "data.epochs", "validation.data"),
            # The adapter in the checkpoint says what these were; the critic's weights are the step's.
            *("lora.rank", "lora.alpha", "lora.targets", "lora.rslora", "lora.modules_to_save"),
            *("lora.save_base", "lora.base", "critic.model"),
        }
    ),
    but=frozenset({"ckpt.interval"}),  # a spike goes back to one of these steps
    consent={"data.batch_size": "batch_size", "data.shuffle": "shuffle", "loss.type": "loss"},
)
ORCHESTRATOR = Compared(
    free=frozenset(
        {
            *OF_ANY_ROLE,
            "seed",  # the trainer's
            *("teachers", "router_replay"),  # as the trainer's settings say
            *("siblings", "branched_at"),  # each answer tells which policy it comes from
            "environments",  # of which each has its own (`OF_ENVIRONMENT`)
            *("inference_url", "max_in_flight", "keep_rollouts_gb", "weight_fan_out"),
            *("reward_threads", "reward_timeout", "reward_retries", "reward_retry_seconds"),
            *(
                "max_failed_prompts",
                "max_failed_share",
                "server_timeout",
                "request_timeout",
                "version_timeout",
            ),
        }
    ),
    consent={
        "environment.code": "",
        "environment.label": "",
        "environment": "environment",
        "prompts_per_step": "prompts_per_step",
        "samples_per_prompt": "samples_per_prompt",
    },
)
OF_ENVIRONMENT = (
    *("environment", "sampling.max_tokens", "sampling.stop", "samples_per_prompt"),
    *("advantage", "overlong", "pools"),
)
"""Those of the orchestrator's settings that each of several environments has for itself."""

OWN_CLASSES: dict[str, tuple[str, Group]] = {
    "loss": ("type", "cairn.losses"),
    "environment": ("name", "cairn.environments"),
    "eval.environment": ("name", "cairn.environments"),
    "advantage": ("type", "cairn.advantages"),
    "optimizer": ("type", "cairn.optimizers"),
    "critic.optimizer": ("type", "cairn.optimizers"),
}
"""Sections that may name a class of the user's own, the setting that does, and the group of such plug-ins.
A digest of the class's code stands in the recipe as the section's `code`: an edit of it is printed, and
breaks no promise."""

ARGUMENTS = (
    *("environment.args", "eval.environment.args", "advantage.args", "loss.args"),
    *("optimizer.args", "critic.optimizer.args"),
)
"""Tables with keys of the user's choice, each of which is compared as a whole."""
NAMED = ("validation", "eval")
"""Lists of tables that have a `name`: the settings of one are called validation[NAME].records and so on."""
ENTRY = re.compile(r"(\w+)\[([^\]]*)\]")

TEMPLATES = "additional_chat_templates"
"""The folder of a tokenizer's chat templates beside the default one, such as `tool_use.jinja`."""
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
    "*.tiktoken",
    f"{TEMPLATES}/*.jinja",
)
"""What a Hugging Face directory holds of the tokenizer and its chat template."""
OLDER_ROTARY = (
    *("rope_theta", "rope_scaling", "partial_rotary_factor"),
    *("rope_local_base_freq", "rotary_emb_base", "rotary_pct"),
)
"""What config.json says in `rope_parameters`, too, if it has that."""
NOT_ARCHITECTURE = {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache"}
"""What config.json says beside the model's architecture."""


def settings_of(config: Mapping[str, Any], compared: Compared) -> dict[str, Any]:
    """The settings of a dumped configuration that belong to the recipe, by dotted name.

    A schedule's end is where it ends, whether that is `scheduler.steps` or the run's `max_steps`. The
    interval of checkpoints belongs to it where a spike goes back to one of them. A section that is off is
    None.
    """
    flat: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        if name in NAMED:
            for entry in cast("list[Mapping[str, Any]]", value):
                about = {key: inner for key, inner in entry.items() if key != "name"}
                walk(about, f"{name}[{entry['name']}]")
        elif isinstance(value, Mapping) and plain(name) not in ARGUMENTS:
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
    return {name: value for name, value in flat.items() if name in compared}


def is_within(name: str, sections: Iterable[str]) -> bool:
    """Whether a setting of this dotted name is one of these, or in one of these sections."""
    return any(covers(key, name) for key in sections)


def plain(name: str) -> str:
    """The name of a setting without the name of the entry of a list that it is of."""
    return ENTRY.sub(r"\1", name)


def code_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the code of the user's own classes that settings name, as more settings."""
    choosing: dict[str, Group] = {f"{section}.{key}": group for section, (key, group) in OWN_CLASSES.items()}
    codes = {
        f"{name.rpartition('.')[0]}.code": code_of(str(value), choosing[plain(name)])
        for name, value in settings.items()
        if plain(name) in choosing
    }
    return {name: code for name, code in codes.items() if code is not None}


def covers(key: str, name: str) -> bool:
    """Whether `key` is the setting of this name, or a section that it is in."""
    name = plain(name)
    return name == key or name.startswith(f"{key}.")


# Identities


INPUTS = ("data", "environment", "tokenizer")
"""The entries of a recipe that say what the run is trained on."""


def inputs_of(trainer: Mapping[str, Any], orchestrator: Mapping[str, Any]) -> dict[str, Any]:
    """What the two parts of a recipe say the run is trained on, as far as they say it."""
    both = {**orchestrator, **trainer}
    return {key: both[key] for key in INPUTS if both.get(key)}


def tokenizer_of(folder: Path) -> str:
    """Names the tokenizer and chat template of a Hugging Face directory: a digest of their files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in tokenizer_files(folder):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)} ".encode() + content)
    return digest.hexdigest()


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a Hugging Face directory's tokenizer and its chat templates, in a fixed order."""
    return sorted(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern))


def in_one_form(about: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without what it says twice: the older names of rotary settings, beside the newer ones."""
    twice = OLDER_ROTARY if isinstance(about.get("rope_parameters"), dict) else ()
    one = {key: value for key, value in about.items() if key not in twice}
    if "num_local_experts" in one and one.get("num_experts") == one["num_local_experts"]:
        del one["num_experts"]
    return {
        key: in_one_form(cast("Mapping[str, Any]", value))
        if isinstance(value, Mapping) and key.endswith("_config")
        else value
        for key, value in one.items()
    }


def model_of(folder: Path) -> str:
    """Names the architecture of a Hugging Face directory."""
    config = in_one_form(json.loads((folder / "config.json").read_text()))
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
    files = [
        path
        for path in tokenizer_files(folder)
        if path.name.startswith(("chat_", "tokenizer_config")) or path.parent.name == TEMPLATES
    ]
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
