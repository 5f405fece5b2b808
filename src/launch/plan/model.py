"""Resolves --model.name to a Hugging Face directory with weights."""

import fcntl
import functools
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from cairn.checkpoint.manifest import FILE_NAME, CheckpointError, load_manifest
from cairn.checkpoint.step_folder import StepFolder
from cairn.config.model import LoraConfig, ModelConfig
from cairn.formats import FORMATS, format_of
from cairn.model.adapters import base_of_adapter
from cairn.model.described import (
    UNQUANTIZED,
    about_model,
    damage_in,
    disagrees,
    note_sums,
    quantization_of,
    refuse_quantized,
)
from cairn.model.peft_settings import adapter_settings
from cairn.remote.hub import network_errors
from cairn.run.errors import CairnError, UsageError
from cairn.run.file_system import flock, open_lock
from cairn.run.files import make_folders, read_json, sync
from cairn.run.output import importing, progress_bars

HUGGING_FACE = {"hf", "hf-trainer"}
"""The formats whose weights every role reads as they are, if they are safetensors."""
ABOUT = ["*.json", "*.jinja", "*.txt", "*.model"]
"""A model's configuration and tokenizer on the hub."""
WEIGHTS = "*.safetensors"


def resolve_model(config: ModelConfig, cache: Path | None = None) -> str:
    """The local directory with the model's weights, configuration and tokenizer, as an absolute path.

    A step_N folder stands for its model/; a model on the hub is downloaded; the weights of another program's
    checkpoint are converted once; a directory with a configuration but no weights gets random ones from
    `init_seed`, created once and kept in the user's cache folder.

    Args:
        cache: folder for converted weights; default: the user's cache folder.

    Raises:
        UsageError: there is no such model, or a file is missing in it.
    """
    path = _in_place(config) or Path(_fetch(config.name, [*ABOUT, WEIGHTS]))
    name = foreign_format(path)
    if name is not None:
        return str(_converted(path, name, config, cache or _cache()))
    if list(path.glob(WEIGHTS)):
        return str(path.absolute())
    if config.init_seed is None:
        raise UsageError(_no_weights(config.name))
    return str(_create(path, config.init_seed))


def described(config: ModelConfig) -> Path | None:
    """A directory with the model's configuration and tokenizer; its weights are neither fetched nor made.

    None: only converting the weights finds out where these are.

    Raises:
        UsageError: `resolve_model` would refuse the model.
    """
    path = _in_place(config)
    if path is None:
        return Path(_fetch(config.name, ABOUT))
    if foreign_format(path) is None:
        return path
    folder = Path(config.config or path)
    return folder if (folder / "config.json").is_file() else None


def _in_place(config: ModelConfig) -> Path | None:
    """Where the model's files are, perhaps of another program; None: not here, so perhaps on the hub.

    Raises:
        UsageError: they are no model, or not complete.
    """
    path = Path(config.name)
    if not path.exists():
        return None
    if is_step(path):
        try:
            load_manifest(path)
        except CheckpointError as error:
            raise UsageError(f"--model.name {config.name}: {error}") from None
        path = StepFolder(path).model
    name = foreign_format(path)
    if name == "peft":
        try:
            adapter_settings(path)
        except CairnError as error:
            raise UsageError(f"--model.name {config.name}: {error}") from None
    if name is not None:
        return path
    if not FORMATS["hf"].detect(path):
        raise UsageError(
            f"--model.name {config.name}: it has no config.json, so it is not a Hugging Face model, nor has "
            f"it another format that Cairn reads ({', '.join(FORMATS)})"
        )
    if not list(path.glob(WEIGHTS)):
        if config.init_seed is None:
            raise UsageError(_no_weights(config.name))
        _check_plain_weights(path, config.name)
    return path


def _no_weights(name: str) -> str:
    return f"--model.name {name}: it has no safetensors weights; --model.init-seed 0 starts from random ones"


def _check_plain_weights(folder: Path, name: str) -> None:
    """Check that the config.json in `folder` describes no quantised weights.

    Raises:
        UsageError: it does, or it is damaged.
    """
    try:
        about = about_model(folder)
        if quantization_of(about):
            refuse_quantized(about, name)
    except CairnError as error:
        raise UsageError(f"--model.name {error}") from None


def model_to_serve(step: Path, lora: LoraConfig | None) -> Path:
    """The Hugging Face directory that servers begin with in a run that resumes from `step`.

    It is the step's own; if the step holds an adapter it is that of the base, and the trainer publishes the
    policy before anything is sampled.

    Raises:
        UsageError: the base is not there.
    """
    model = StepFolder(step).model
    try:
        base = base_of_adapter(model)
        return base.find(model, lora and lora.base) if base else model
    except CheckpointError as error:
        raise UsageError(str(error)) from None


def is_step(path: Path) -> bool:
    """Whether `path` is meant as a checkpoint of Cairn: other programs have folders named model, too."""
    return StepFolder(path).model.is_dir() and ((path / FILE_NAME).exists() or format_of(path) is None)


def foreign_format(path: Path) -> str | None:
    """The format of weights that have to be converted; None if there is nothing to convert in `path`."""
    name = format_of(path)
    if name not in HUGGING_FACE:
        return name
    if any(path.glob("*.safetensors")):
        return "hf" if _disagrees(path) else None
    return "hf" if any(path.glob("pytorch_model*.bin")) else None


def _disagrees(path: Path) -> bool:
    """Whether a folder's config.json and tensors contradict each other, so that a corrected copy is made.

    Raises:
        UsageError: a file is invalid, or the weights are quantised.
    """
    try:
        files = sorted((*path.glob("*.safetensors*"), path / "config.json"))
        known = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
        return _disagrees_once(path, known)
    except OSError as error:
        raise UsageError(f"--model.name {path}: {error.filename}: {error.strerror}") from None
    except CairnError as error:
        raise UsageError(f"--model.name {error}") from None


@functools.cache
def _disagrees_once(path: Path, files: tuple[tuple[str, int, int], ...]) -> bool:
    return disagrees(path)


def _converted(path: Path, name: str, config: ModelConfig, cache: Path) -> Path:
    """The Hugging Face directory of the weights in `path`, in the format `name`.

    Raises:
        UsageError: they can't be converted; the message says why.
    """
    with importing():
        from cairn.formats.transfer.import_step import convert, place_in

    model = Path(config.config) if config.config else None
    if model is not None and not (model / "config.json").is_file():
        raise UsageError(f"--model.config {model}: it has no config.json")
    try:
        target = place_in(cache, path, name, model)
        problem = damage_in(target) if target.exists() else None
        if target.exists() and problem is None:
            print(f"{path} has the format {name}; {target} holds its weights already", flush=True)
            return target
        said: list[str] = []
        if problem:
            print(f"{target} is made again: {problem}", flush=True)
        print(f"{path} has the format {name}; its weights are converted once, to {target}", flush=True)
        with progress_bars() as stage:
            convert(path, target, name, model=model, stage=stage, say=said.append)
        for sentence in said:
            print(f"{config.name}: {sentence}", flush=True)
    except CairnError as error:
        raise UsageError(f"--model.name {config.name}: {error}") from None
    except FileNotFoundError as error:
        raise UsageError(f"--model.name {config.name}: {error.filename}: {error.strerror}") from None
    return target


def _refuse_quantized(folder: Path, name: str) -> None:
    """Refuse a model on the hub whose weights are quantised, before they are fetched.

    What config.json says counts only if the tensors' data types, which the hub tells, don't say otherwise.

    Raises:
        UsageError: they are.
    """
    if not quantization_of(about_model(folder)):
        return
    from huggingface_hub import get_safetensors_metadata

    try:
        kinds = {
            info.dtype
            for file in get_safetensors_metadata(name).files_metadata.values()
            for info in file.tensors.values()
        }
    except Exception:  # whatever the hub's client raises: then config.json is believed
        kinds = {"?"}
    if kinds - UNQUANTIZED:
        _check_plain_weights(folder, name)


def _fetch(name: str, patterns: list[str]) -> str:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise UsageError(
            f"--model.name {name}: there is no such folder, and it is not a hub name (owner/name)"
        )
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        _refuse_quantized(Path(hf_hub_download(name, "config.json")).parent, name)
        return os.path.abspath(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, *network_errors(), OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"--model.name {name}: there is no such folder, and the hub did not deliver it ({reason})"
        ) from None


def _cache() -> Path:
    """The user's cache folder for models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "cairn" / "models"


def _create(source: Path, seed: int) -> Path:
    """Random weights for the configuration in `source`; the same files and seed give the same weights.

    They are kept in the user's cache folder with their checksums, and made again if they are not as they were
    written.
    """
    digest = hashlib.blake2b(f"{seed}, hub names".encode(), digest_size=8)
    for file in sorted(path for path in source.iterdir() if path.is_file()):
        digest.update(file.name.encode() + file.read_bytes())
    cache = _cache()
    target = cache / f"{source.absolute().parent.name}-{digest.hexdigest()}"
    make_folders(cache)
    lock = cache / ".lock"
    fd = open_lock(lock)
    try:
        flock(fd, fcntl.LOCK_EX, lock)  # one process makes it, others wait
        if target.exists():
            if (problem := damage_in(target)) is None:
                return target
            print(f"{target} is made again: {problem}", flush=True)
            shutil.rmtree(target)
        print(f"creating a model with random weights (seed {seed}) from {source}", flush=True)
        _make(source, seed, target)
        note_sums(target)
    finally:
        os.close(fd)
    return target


def _make(source: Path, seed: int, target: Path) -> None:
    """Write a model with random weights to the folder `target`, which appears complete and durable."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from cairn.checkpoint.tensors.placement import at_places
    from cairn.checkpoint.tensors.sharded_files import write_tensors
    from cairn.model.hub_layout import layout_of, tensors_in_memory
    from cairn.run.seeds import derive

    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        folder = Path(temporary) / "model"
        shutil.copytree(source, folder)
        torch.manual_seed(derive(seed, "model weights"))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
        model.config.save_pretrained(folder)
        tensors = at_places(tensors_in_memory(model), layout_of(model).places)
        write_tensors(folder, tensors, "model")
        for path in (*folder.iterdir(), folder):
            sync(path)
        folder.rename(target)
    sync(target.parent)


def vocabulary_size(folder: Path) -> int:
    """Rows of the embeddings of a Hugging Face directory's model, padding included; 0 if it does not say."""
    about = read_json(folder / "config.json", dict) or {}
    return int((about.get("text_config") or about).get("vocab_size") or 0)
