"""The part of this process's environment that workers in a running Ray cluster get as well.

Such workers have the environment of whoever started their node. Ray's own way, `runtime_env`, would write the
variables into a log on every node, tokens and keys among them; so each worker is told them by a call, before
it imports anything that reads them. A cluster that Cairn starts itself inherits the whole environment.
"""

import os
import sys
from collections.abc import Mapping

from cairn.config.trainer import TrainerBase

PREFIXES = (
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_"),
    *("NCCL_", "GLOO_", "CUDA_", "CUBLAS_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_"),
    *("OMP_", "GOMP_", "CAIRN_"),
)
"""What the names begin with of the variables that are handed over."""
NAMES = (
    *("PYTHONPATH", "XDG_CACHE_HOME", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"),
    *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT"),
)
"""Others that are handed over; those of proxies also in lower case. Of object stores only where they are:
credentials stay on their machine."""
NODES_OWN = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH")
"""What begins like this but belongs to a node: its GPUs are given out by Ray, its folders may differ."""
PATHS = ("PYTHONPATH", "_HOME", "_CACHE", "_DIR", "_PATH")
"""Ends of names whose values are paths, or several with colons between them: they are made absolute."""


def environment_for_workers(config: TrainerBase) -> dict[str, str]:
    """What the trainer's workers have to be told of the environment; nothing in a cluster of Cairn's own."""
    if config.ray.address is None:
        return {}
    return {name: _absolute(name, value) for name, value in os.environ.items() if _is_handed_over(name)}


def adopt(environment: Mapping[str, str]) -> None:
    """In a worker: take over what `environment_for_workers` returned, the path of Python modules included."""
    os.environ.update(environment)
    wanted = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in wanted if path not in sys.path]


def _is_handed_over(name: str) -> bool:
    return name not in NODES_OWN and (name.startswith(PREFIXES) or name.upper() in NAMES)


def _absolute(name: str, value: str) -> str:
    if not value or not name.endswith(PATHS) or "://" in value:
        return value
    return os.pathsep.join(os.path.abspath(path) if path else os.getcwd() for path in value.split(os.pathsep))
