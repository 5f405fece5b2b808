"""Hints for unknown settings: what the user may have meant.

`RENAMED` and `MISSING` list names from other frameworks. A hint never names a setting that the command does
not have.
"""

import difflib
from pathlib import Path
from typing import get_args

from cairn.config.settings import Setting

FILES = (".toml", ".json", ".yaml", ".yml")
"""Suffixes of configuration files."""

RENAMED = {
    # TRL and the transformers Trainer
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.max_grad_norm",
    "lr_scheduler_type": "scheduler.type",
    "warmup_steps": "scheduler.warmup_steps",
    "warmup_ratio": "scheduler.warmup_steps",
    "gradient_checkpointing": "activation_checkpointing",
    "torch_compile": "compile",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
    "model_name_or_path": "model.name",
    "dataset_name": "data.name",
    "dataset_train_split": "data.split",
    "num_train_epochs": "data.epochs|max_steps",
    "epochs": "data.epochs|max_steps",
    "steps": "max_steps",
    "save_steps": "ckpt.interval",
    "save_total_limit": "ckpt.keep_last",
    "resume_from_checkpoint": "ckpt.resume",
    "run_name": "wandb.name",
    "report_to": "wandb.project",
    "num_generations": "samples_per_prompt",
    "max_completion_length": "sampling.max_tokens",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "delta": "loss.dual_clip",
    "loss_type": "loss.type",
    "importance_sampling_level": "loss.type",
    "sapo_temperature_pos": "loss.tau_pos",
    "sapo_temperature_neg": "loss.tau_neg",
    "entropy_coef": "loss.entropy_coef",
    "vllm_importance_sampling_mode": "loss.importance",
    "vllm_importance_sampling_clip_max": "loss.importance_max",
    "vllm_importance_sampling_clip_min": "loss.importance_min",
    "scale_rewards": "normalize_advantages",
    "vllm_server_base_url": "inference_url",
    "vllm_max_model_length": "max_model_len",
    "max_staleness": "max_off_policy_steps",
    "max_inflight_tasks": "max_in_flight",
    # prime-rl
    "optim.lr": "optimizer.lr",
    "optim.weight_decay": "optimizer.weight_decay",
    "optim.max_norm": "optimizer.max_grad_norm",
    "optim.betas1": "optimizer.betas",
    "optim.betas2": "optimizer.betas",
    "scheduler.decay_steps": "scheduler.steps",
    "scheduler.min_lr": "scheduler.min_lr_ratio",
    "keep_interval": "ckpt.keep_every",
    "resume": "ckpt.resume",
    "resume.step": "ckpt.resume_step",
    "resume.dir": "ckpt.resume",
    "resume_step": "ckpt.resume_step",
    "run.name": "output_dir",
    "monitors.wandb.project": "wandb.project",
    "monitors.wandb.name": "wandb.name",
    "weight_broadcast.type": "weight_transport",
    "model.ac": "activation_checkpointing",
    "dp_replicate": "replicas",
    "model.dp_replicate": "replicas",
    "model.compile": "compile",
    "model.seq_len": "seq_len",
    "model.optimization_dtype": "precision.compute",
    "model.reduce_dtype": "precision.reduce",
    "data.seq_len": "seq_len",
    "data.splits": "data.split",
    "group_size": "samples_per_prompt",
    "rollouts_per_example": "samples_per_prompt",
    "concurrency.max_inflight": "max_in_flight",
    "sampling.max_completion_tokens": "sampling.max_tokens",
    "env.id": "environment.name",
    "train.source": "environments",
    "loss.dppo_mask_low": "loss.delta_low",
    "loss.dppo_mask_high": "loss.delta_high",
    # verl
    "actor_rollout_ref.model.path": "model.name",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.rollout.n": "samples_per_prompt",
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "actor_rollout_ref.actor.clip_ratio_low": "loss.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "loss.dual_clip",
    "actor_rollout_ref.actor.entropy_coeff": "loss.entropy_coef",
    "actor_rollout_ref.actor.loss_agg_mode": "loss.aggregation",
    "algorithm.adv_estimator": "advantage.type",
    "algorithm.rollout_correction.rollout_is": "loss.importance",
    "algorithm.rollout_correction.rollout_is_threshold": "loss.importance_max",
    "data.train_files": "data.name",
    "data.max_response_length": "sampling.max_tokens",
    "trainer.save_freq": "ckpt.interval",
    "trainer.total_epochs": "data.epochs|max_steps",
    "trainer.default_local_dir": "output_dir",
    # Telescope, SkyRL, and how the transformers Trainer names checkpoints
    "checkpoint_every": "ckpt.interval",
    "ckpt_interval": "ckpt.interval",
    "checkpoint_dir": "ckpt.dir",
    "ckpt_path": "ckpt.dir",
    "checkpoint_save_training_state": "ckpt.training_state",
    "save_only_model": "ckpt.training_state",
    "checkpoint_keep_last": "ckpt.keep_last",
    "max_ckpts_to_keep": "ckpt.keep_last",
    "checkpoint_keep_every": "ckpt.keep_every",
    "load_best_model_at_end": "ckpt.keep_best",
    "metric_for_best_model": "ckpt.metric",
    "greater_is_better": "ckpt.mode",
    "save_strategy": "ckpt.interval",
    "resume_mode": "ckpt.resume",
    "resume_path": "ckpt.resume",
    # abbreviations and other likely guesses
    "model": "model.name",
    "data": "data.name",
    "dataset": "data.name",
    "output": "output_dir",
    "save_every": "ckpt.interval",
    "gpus": "workers",
    "num_gpus": "workers",
    "world_size": "workers",
    "tensor_parallel_size": "tensor_parallel",
    "gpu_memory_utilization": "kv_cache_memory",
}
"""Names used elsewhere, and the last keys of the corresponding setting here."""

NOTES = {
    "warmup_ratio": "in steps",
    "scheduler.min_lr": "as a fraction of the peak",
    "bf16": "--precision.compute bfloat16",
    "fp16": "float32 or bfloat16",
    "adam_beta1": "both values: --optimizer.betas 0.9 0.95",
    "adam_beta2": "both values: --optimizer.betas 0.9 0.95",
    "optim.betas1": "both values: --optimizer.betas 0.9 0.95",
    "optim.betas2": "both values: --optimizer.betas 0.9 0.95",
    "resume": "latest, auto, or the path of a step_N folder",
    "resume.dir": "the path of a step_N folder",
    "loss.dppo_mask_low": "with loss.type = mask; a ratio, not a difference",
    "loss.dppo_mask_high": "with loss.type = mask; a ratio, not a difference",
    "gpu_memory_utilization": "in bytes, such as 4G",
    "save_only_model": "false saves weights only",
    "greater_is_better": "min or max",
    "resume_mode": "latest, auto, or the path of a step_N folder",
    "resume_path": "the path of a step_N folder",
}
"""How the setting here differs, by the names in `RENAMED`."""

MISSING = {
    "packing": "samples are always packed into rows of --seq-len tokens",
    "padding_free": "samples are always packed into rows of --seq-len tokens",
    "gradient_accumulation_steps": "a step's samples are split into as many micro-batches as they need",
    "logging_steps": "metrics.jsonl has a row for every step",
    "deepspeed": "FSDP2 shards parameters, gradients and optimiser state over all --workers",
    "fsdp": "FSDP2 is always on with several workers",
}
"""Names used elsewhere that have no setting here, and why none is needed."""

BATCH_SIZES = ("batch_size", "per_device_train_batch_size", "train_batch_size", "data.train_batch_size")


def unknown_setting(path: tuple[str, ...], root: Setting, hidden: set[tuple[str, ...]], value: object) -> str:
    """The message about an unknown setting.

    Args:
        path: its keys.
        hidden: settings that must not be suggested.
        value: the value that was given for it.
    """
    known = {leaf.path: leaf for leaf in root.leaves() if leaf.path not in hidden}
    said = "there is no such setting"
    if path[-1] in ("config", "config_file", "cfg") and len(path) == 1:
        return (
            f"{said}; a configuration file is given as `@ {value if isinstance(value, str) else 'file.toml'}`"
        )
    hint = _renamed(path, known) or _missing(path) or _elsewhere(path, known) or _misspelt(path, known)
    if hint:
        return f"{said}; {hint}"
    section = root.find(path[:-1])
    if section and section.kind == "section" and len(path) > 1:
        names = [leaf.path[-1].replace("_", "-") for leaf in known.values() if leaf.path[:-1] == section.path]
        if names:
            return f"{said}; [{section.name}] has {', '.join(names)}"
    return f"{said}; --help lists all settings"


def of_another_type(setting: Setting, root: Setting, now: object) -> str:
    """The message about a setting that exists only if its section has another type than `now`."""
    section = root.find(setting.path[:-1])
    key = setting.path[-1]
    owners = [
        choice
        for model in (section.models if section else ())
        if key in model.model_fields
        for choice in get_args(model.model_fields["type"].annotation) or ("module:Class",)
    ]
    return f"it is a setting of type {' and '.join(owners)}, and type is {now}"


def unknown_in_table(
    tables: Setting, place: tuple[int | str, ...], root: Setting, hidden: set[tuple[str, ...]]
) -> str:
    """The message about an unknown setting in one of a list of tables, such as [[data.sets]].

    Args:
        tables: the list.
        place: the number of the table, counted from 0, and the keys in it.
        hidden: settings that must not be suggested.
    """
    keys = tuple(str(key) for key in place[1:] if isinstance(key, str))
    number = int(place[0]) + 1
    said = f"table {number} has {'.'.join(keys)!r}, and there is no such setting in a [[{tables.name}]] table"
    known = {leaf.path: leaf for leaf in root.leaves() if leaf.path not in hidden}
    model = next((one for one in get_args(tables.annotation) if hasattr(one, "model_fields")), None)
    unlisted: frozenset[str] = getattr(model, "unlisted", frozenset())
    fields = [name for name in getattr(model, "model_fields", ()) if name not in unlisted]
    if len(keys) == 1 and (close := one_of(keys[0], fields)):
        return f"{said}{close}"
    found = _ending_in(keys, known, tables.path[:1])
    if found and len(found) <= 2:
        return f"{said}; did you mean {_either(found)}?"
    return f"{said}; it has {', '.join(fields)}" if fields else said


def flag_without_dashes(word: str, follows: str, root: Setting) -> str:
    """The message about a flag with one dash, such as `-max-steps`."""
    path = tuple(word.lstrip("-").partition("=")[0].replace("-", "_").split("."))
    if root.find(path):
        return f"{word}: did you mean -{word}? Flags begin with two dashes"
    if path[0] in ("c", "config") and not follows.startswith("-"):
        return f"{word}: a configuration file is given as `@ {follows}`"
    return f"{word}: flags begin with two dashes; --help lists them"


def stray_argument(word: str, last: tuple[str, ...], root: Setting) -> str:
    """The message about a word that belongs to no flag."""
    if word.endswith(FILES) or Path(word).is_file():
        return f"{word}: a configuration file is given as `@ {word}`"
    if root.find(tuple(word.partition("=")[0].replace("-", "_").split("."))):
        return f"{word}: did you mean --{word}?"
    after = root.find(last) if last else None
    if after:
        takes = {"section": "no value", "flag": "no value but true or false"}.get(after.kind, "one value")
        return f"unexpected argument {word!r}: {after.flag} takes {takes}"
    return f"unexpected argument {word!r}; --help lists what can be given"


def one_of(wanted: object, choices: list[str]) -> str:
    """A question that suggests the closest choice, or an empty string."""
    close = difflib.get_close_matches(str(wanted), choices, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _renamed(path: tuple[str, ...], known: dict[tuple[str, ...], Setting]) -> str | None:
    for start in range(len(path)):
        name = ".".join(path[start:])
        if name in BATCH_SIZES:
            return _batch_size(known)
        if name in RENAMED:
            names = (tuple(there.split(".")) for there in RENAMED[name].split("|"))
            if found := next(filter(None, (_ending_in(there, known, path[:start]) for there in names)), None):
                note = f" ({NOTES[name]})" if name in NOTES else ""
                return f"did you mean {_either(found)}?{note}"
    return None


def _missing(path: tuple[str, ...]) -> str | None:
    return MISSING.get(path[-1])


def _batch_size(known: dict[tuple[str, ...], Setting]) -> str | None:
    if found := _ending_in(("data", "batch_size"), known, ()):
        return f"did you mean {_either(found)}? (records in one optimiser step, over all ranks)"
    if found := _ending_in(("prompts_per_step",), known, ()):
        return f"did you mean {_either(found)}? (each with as many answers as samples-per-prompt says)"
    return None


def _elsewhere(path: tuple[str, ...], known: dict[tuple[str, ...], Setting]) -> str | None:
    """The same name in another section, or the same setting at another depth."""
    for start in range(len(path)):
        found = _ending_in(path[start:], known, path[:start])
        if found and len(found) <= 2:
            return f"did you mean {_either(found)}?"
    return None


def _misspelt(path: tuple[str, ...], known: dict[tuple[str, ...], Setting]) -> str | None:
    beside = {keys[-1]: leaf for keys, leaf in known.items() if keys[:-1] == path[:-1]}
    close = difflib.get_close_matches(path[-1], beside, n=1, cutoff=0.6)
    if not close and len(path) == 1:
        beside = {keys[-1]: leaf for keys, leaf in known.items()}
        close = difflib.get_close_matches(path[-1], beside, n=1, cutoff=0.8)
    return f"did you mean {beside[close[0]].flag}?" if close else None


def _ending_in(
    end: tuple[str, ...], known: dict[tuple[str, ...], Setting], near: tuple[str, ...]
) -> list[Setting]:
    """The settings whose last keys are these; only those below the named section, if there are any."""
    found = [leaf for path, leaf in known.items() if path[-len(end) :] == end]
    below = [leaf for leaf in found if near and leaf.path[0] == near[0]]
    return below or found


def _either(found: list[Setting]) -> str:
    return " or ".join(leaf.flag for leaf in found[:3])
