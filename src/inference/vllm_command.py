"""The command line and environment of vLLM's server, from the settings. Imports neither torch nor vllm."""

import atexit
import csv
import fcntl
import json
import os
import shutil
import sys
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

from cairn.checkpoint.checksums import crc64
from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.step_folder import is_reward_model
from cairn.checkpoint.tensors.layout import find_tensors
from cairn.config.inference import InferenceConfig
from cairn.config.model import MAX_RANK
from cairn.run.errors import UsageError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, MAX_RANK)
"""Those that vLLM reserves memory for."""
HEADS = {"lm_head", "embed_tokens"}
EXPERTS_SCHEDULER = "cairn.inference.plugin.routed_experts.ExpertsScheduler"
"""What has a server on a CPU tell the experts of tokens."""
MEETS_HERE = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
"""Where the engine's own processes meet, which ask for no token. vLLM would take the address towards the
internet, and gloo the one that the machine's name stands for."""
MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
}
"""Has glibc keep what an update frees, up to 1 GiB, for the packed copies that the next one makes: pages that
are new to the process take several times as long to fill."""


def command(config: InferenceConfig, model: str) -> tuple[list[str], dict[str, str]]:
    """The command line of vLLM's server, and what it needs in its environment beyond ours.

    `model` is a Hugging Face directory or hub name. Starts and changes nothing.

    Raises:
        UsageError: vLLM is not installed, or not as a whole; or the model gives no answers.
    """
    if is_reward_model(Path(model)):
        raise UsageError(
            f"--model.name {model}: a reward model gives conversations a number, and answers nothing, so the "
            "inference server has no use for it. In RL it is a reward function (docs/how-to/preferences.md); "
            f"vLLM's own server serves it: vllm serve {model} --runner pooling"
        )
    cpu = installed_build() == "cpu"
    config = config.settled(gpu_servers=not cpu)
    argv = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    argv += ["--model", model, "--host", config.host, "--port", str(config.port)]
    argv += ["--dtype", served_dtype(config, model, on_gpu=not cpu)]
    if config.max_num_seqs is not None:
        argv += ["--max-num-seqs", str(config.max_num_seqs)]
    # auto: the model's own limit, or what fits into the KV cache if that is less.
    argv += ["--max-model-len", str(config.max_model_len or "auto")]
    argv += ["--enable-scale-out"]  # generation with token ids in and out
    argv += ["--logprobs-mode", "processed_logprobs"]  # of the distribution that was sampled from
    argv += ["--generation-config", "vllm"]  # no sampling defaults from the model's directory
    if config.max_lora_rank is None:
        argv += ["--weight-transfer-config", '{"backend": "filesystem"}']
    else:
        argv += _of_adapters(config.max_lora_rank, config.max_loras, Path(model))
    argv += ["--enable-prompt-tokens-details"]  # how much of a prompt was in the cache
    argv += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    env = {
        "VLLM_PLUGINS": "cairn",  # endpoint plugins load only if named
        "VLLM_SERVER_DEV_MODE": "0",  # would open the RL routes without a token
        "VLLM_NO_USAGE_STATS": "1",
    }
    if os.path.isdir(model):
        env["HF_HUB_OFFLINE"] = "1"
    kv_cache_memory = config.kv_cache_memory
    if not config.compile:
        argv += ["--enforce-eager"]
    if cpu:
        kv_cache_memory = kv_cache_memory or "1G"
        argv += ["--load-format", "cairn", "--distributed-executor-backend", "uni"]
        # A prompt in several chunks kills vLLM's CPU engine if the request has a seed.
        argv += ["--no-enable-chunked-prefill"]
        env |= {
            **MEETS_HERE,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are shared with the trainer
            "OMP_NUM_THREADS": str(config.threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **{name: os.environ.get(name, value) for name, value in MALLOC.items()},
        }
        if not config.compile:
            env["TORCHDYNAMO_DISABLE"] = "1"
        if config.return_experts:  # read between passes, before the next one may use the same slots
            argv += ["--scheduler-cls", EXPERTS_SCHEDULER, "--no-async-scheduling"]
    else:
        argv += ["--tensor-parallel-size", str(config.tensor_parallel)]
        if not os.environ.get("VLLM_HOST_IP"):
            env |= MEETS_HERE
        if config.return_experts:
            argv += ["--enable-return-routed-experts"]
        if config.colocated:  # puts weights and KV cache where they can be freed; on a CPU nothing is
            argv += ["--enable-sleep-mode"]
    changes: dict[str, int | str] = {**overrides(model)}
    if config.head == "float32":
        changes["head_dtype"] = "float32"  # vLLM's name for logits in float32 of a model in 16 bits
    if changes:
        argv += ["--hf-overrides", json.dumps(changes)]
    if kv_cache_memory:
        argv += ["--kv-cache-memory-bytes", kv_cache_memory]
    return argv + config.vllm_args, env


def _of_adapters(max_rank: int, max_loras: int, model: Path) -> list[str]:
    """The arguments for a server that computes adapters beside its model.

    Layers that no adapter has, embeddings and heads above all, are left as they are: on CPUs vLLM's head with
    an adapter dies of scoring a prompt while it generates.

    Raises:
        UsageError: the model's folder can't be read, which tells the names of its layers.
    """
    try:
        tensors = find_tensors(model, "model").values()
        size = vocabulary(json.loads((model / "config.json").read_text()))
    except (OSError, ValueError, Damaged) as error:
        raise UsageError(
            f"--max-lora-rank {max_rank}: the names of the model's layers can't be read in {model}, which "
            f"must be a folder with its files: {error}"
        ) from None
    matrices = [t.spec for t in tensors if len(t.spec.shape) == 2 and t.spec.name.endswith(".weight")]
    layers = {spec.name.split(".")[-2] for spec in matrices if spec.shape[0] != size}
    rank = next(rank for rank in RANKS if rank >= max_rank)
    return [
        *("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(max_loras)),
        *("--max-cpu-loras", str(2 * max_loras), "--lora-target-modules", *sorted(layers - HEADS)),
        *("--worker-extension-cls", "cairn.inference.plugin.adapter_modules.AdapterModules"),
    ]


def vocabulary(settings: dict[str, Any]) -> int | None:
    """The tokens of a model, by its config.json."""
    return settings.get("vocab_size") or (settings.get("text_config") or {}).get("vocab_size")


def served_dtype(config: InferenceConfig, model: str, *, on_gpu: bool) -> str:
    """The data type to ask vLLM for, where the model's files may have another.

    On CPUs, float32 stays float32, which vLLM's own `auto` would turn into 16 bits. On GPUs it becomes
    bfloat16, in which its kernels are fast and a checkpoint of master weights takes half the memory.
    """
    if config.dtype != "auto":
        return config.dtype
    try:
        saved = json.loads((Path(model) / "config.json").read_text())
    except OSError:
        return "auto"
    dtype = saved.get("dtype") or saved.get("torch_dtype")
    if dtype == "float32" and on_gpu:
        return "bfloat16"
    return dtype if dtype in ("float32", "bfloat16", "float16") else "auto"


def overrides(model: str) -> dict[str, int]:
    """What vLLM has to read otherwise in the config.json of `model` to compute what transformers does."""
    try:
        settings = json.loads((Path(model) / "config.json").read_text())
    except OSError:
        return {}
    if settings.get("model_type") == "cohere2" and settings.get("sliding_window"):
        return {"sliding_window": settings["sliding_window"] - 1}  # vLLM adds the token itself
    return {}


# Whether two folders hold the same model, without reading all of it.


SAMPLES = 256
"""Pieces of each file that are read."""
SAMPLE_BYTES = 4096


def samples_of(folder: Path) -> dict[str, str]:
    """Of each tensor file in a model's folder, its size and the checksum of pieces at even distances."""
    return {file.name: _sampled(file) for file in sorted(folder.glob("*.safetensors")) if file.is_file()}


def differing_files(folder: Path, samples: dict[str, str] | None) -> list[str]:
    """The tensor files of the model in `folder` that another model does not have, or not with these values.

    Args:
        samples: the other model's; None: nobody knows them, and no file differs.
    """
    if samples is None:
        return []
    return [name for name, sample in samples_of(folder).items() if samples.get(name) != sample]


def _sampled(file: Path) -> str:
    size, crc = file.stat().st_size, 0
    with file.open("rb") as opened:
        for piece in range(SAMPLES):
            opened.seek(size * piece // SAMPLES)
            crc = crc64(opened.read(SAMPLE_BYTES), crc)
    return f"{size}:{crc:016x}"


# Where a server keeps its copies of policies, that is, of adapters and of what it has downloaded: known to
# the server, and to what starts and kills it.


NAME = "cairn-policies-"
"""What the names of such folders begin with."""
HELD = "held"
"""File in such a folder whose server has locked the folder."""


def copies_folder(epoch: str, root: Path | None = None) -> Path:
    """The folder of one start of a server. root: default: where temporary files go."""
    return (root or Path(tempfile.gettempdir())) / f"{NAME}{epoch}"


def make_copies_folder(folder: Path) -> Path:
    """Make the folder, which goes when this process ends; those beside it are deleted whose servers, and what
    started them, were killed."""
    for old in folder.parent.glob(f"{NAME}*/{HELD}"):
        try:
            fd = os.open(old.parent, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # another user's, or just deleted
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old.parent, ignore_errors=True)
        except OSError:  # its server runs
            pass
        finally:
            os.close(fd)
    folder.mkdir(mode=0o700)
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)  # until this process ends
    (folder / HELD).touch()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# Which build of vLLM is installed: decided here, once, for everything that depends on it.
#
# vLLM has two builds, the distributions `vllm` (CUDA) and `vllm-cpu`, whose files have the same names. In an
# environment that holds both, the files of the one that was installed last lie over the files of the other.


Build = Literal["cpu", "gpu"]

MEND = (
    "`scripts/setup gpu` installs the CUDA build and nothing of the other, `scripts/setup cpu` the CPU build"
)


def installed_build() -> Build:
    """The build of vLLM in this environment, which is whole as far as the sizes of its libraries show.

    Raises:
        UsageError: there is none; there are both; or files of the other build have replaced its own. The
            message names the command that mends it.
    """
    cuda, cpu = _find("vllm"), _find("vllm-cpu")
    if cuda and cpu:
        raise UsageError(
            "both builds of vLLM are installed, vllm (CUDA) and vllm-cpu, and one has overwritten files of "
            "the other, as a `uv run` without UV_NO_SYNC=1 does in an environment that was made for GPUs. "
            f"{MEND}"
        )
    found = cuda or cpu
    if found is None:
        raise UsageError(f"vLLM is not installed: {MEND}")
    if wrong := _replaced(found):
        raise UsageError(
            f"vLLM ({found.name} {found.version}) is not installed as a whole: {wrong} is missing, or a file "
            f"of another build. {MEND}"
        )
    return _build_of(found)


def serves_on_gpus() -> bool:
    """Whether the build of vLLM in this environment is the one for GPUs; false without any.

    For commands that may do without vLLM, such as `sft`: it does not check whether the build is whole.
    """
    found = _find("vllm-cpu") or _find("vllm")
    return found is not None and _build_of(found) == "gpu"


def _build_of(found: Distribution) -> Build:
    # One that was built from source for CPUs is called vllm as well; its version ends in +cpu.
    return "cpu" if found.name == "vllm-cpu" or "cpu" in found.version else "gpu"


def _find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _replaced(found: Distribution) -> str | None:
    """The first of the distribution's libraries that is not as it was installed, if there is one."""
    for name, _, size in csv.reader((found.read_text("RECORD") or "").splitlines()):
        if name == "vllm/__init__.py" or (name.startswith("vllm/") and name.endswith(".so")):
            try:
                if Path(str(found.locate_file(name))).stat().st_size != int(size):
                    return name
            except OSError:
                return name
    return None
