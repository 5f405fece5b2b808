"""Resolves --model.name to a Hugging Face directory with weights."""

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from cairn.checkpoint.formats import FORMATS
from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step import StepFolder
from cairn.checkpoint.store import load_manifest
from cairn.config.model import ModelConfig
from cairn.run.errors import UsageError
from cairn.run.files import read_json


def resolve_model(config: ModelConfig) -> str:
    """The local directory with the model's weights, configuration and tokenizer, as an absolute path.

    A step_N folder stands for its model/; a model on the hub is downloaded; a directory with a configuration
    but no weights gets random ones from `init_seed`, created once and kept in the user's cache folder.

    Raises:
        UsageError: there is no such model, or a file is missing in it.
    """
    path = Path(config.name)
    if not path.is_dir():
        return _fetch(config.name)
    if StepFolder(path).model.is_dir():
        try:
            load_manifest(path)
        except CheckpointError as error:
            raise UsageError(f"--model.name {config.name}: {error}") from None
        path = StepFolder(path).model
    if not FORMATS["hf"].detect(path):
        raise UsageError(
            f"--model.name {config.name}: it has no config.json, so it is not a Hugging Face model"
        )
    _refuse_quantized(path / "config.json", config.name)
    if list(path.glob("*.safetensors")):
        return str(path.absolute())
    if config.init_seed is None:
        raise UsageError(
            f"--model.name {config.name}: it has no safetensors weights; "
            "--model.init-seed 0 starts from random ones"
        )
    return str(_create(path, config.init_seed))


def _refuse_quantized(path: Path, name: str) -> None:
    """Refuse quantized weights, such as those of gpt-oss and DeepSeek-V3: they can't be trained directly.

    Raises:
        UsageError: the weights are quantized.
    """
    about = (read_json(path, dict) or {}).get("quantization_config")
    if about:
        kind = about.get("quant_method", "method unknown") if isinstance(about, dict) else about
        raise UsageError(
            f"--model.name {name}: its weights are quantized ({kind}), and Cairn trains float32 or bfloat16; "
            "transformers converts them: AutoModelForCausalLM.from_pretrained with the method's dequantize, "
            "then save_pretrained into a folder without quantization_config in its config.json"
        )


def _fetch(name: str) -> str:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise UsageError(
            f"--model.name {name}: there is no such folder, and it is not a hub name (owner/name)"
        )
    import httpx
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        _refuse_quantized(Path(hf_hub_download(name, "config.json")), name)
        return os.path.abspath(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"--model.name {name}: there is no such folder, and the hub did not deliver it ({reason})"
        ) from None


def _create(source: Path, seed: int) -> Path:
    """Random weights for the configuration in `source`; the same files and seed give the same weights."""
    digest = hashlib.blake2b(f"{seed}, hub names".encode(), digest_size=8)
    for file in sorted(path for path in source.iterdir() if path.is_file()):
        digest.update(file.name.encode() + file.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "cairn" / "models"
    target = cache / f"{source.absolute().parent.name}-{digest.hexdigest()}"
    if target.exists():
        return target
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from cairn.checkpoint.formats.hub import layout_of, tensors_in_memory
    from cairn.checkpoint.shares import at_places
    from cairn.checkpoint.tensors import write_tensors
    from cairn.run.seeds import derive

    print(f"creating a model with random weights (seed {seed}) from {source}", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        folder = Path(temporary) / "model"
        shutil.copytree(source, folder)
        torch.manual_seed(derive(seed, "model weights"))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
        model.config.save_pretrained(folder)
        tensors = at_places(tensors_in_memory(model), layout_of(model).places)
        write_tensors(folder, tensors, "model")
        try:
            folder.rename(target)
        except OSError:  # another process has created it first
            if not target.exists():
                raise
    return target
