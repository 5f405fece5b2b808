"""Serve families of tests/families.py one after the other with vLLM in this process; prints a JSON line each.

python serve_families.py FOLDER FAMILY... , in the environment that test_served_families.py gives it
"""

import contextlib
import gc
import json
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import families
import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.config import ModelConfig, WeightTransferConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from cairn.inference.plugin.loading import RepackableLoader
from cairn.inference.plugin.updates import differing
from cairn.inference.vllm_command import EXPERTS_SCHEDULER, overrides

families.FAMILIES["heads_of_16"] = families.Family("llama", "dense", {**families.SIZE, "head_dim": 16})
families.FAMILIES["loaded_wrongly"] = families.FAMILIES["qwen3_moe"]
TOKENS = [3 + i * i % 97 for i in range(40)]
TELLING = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "glm4_moe", "ernie4_5_moe")
"""Families whose servers tell the experts of tokens on CPUs."""


def reference(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS]), use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def served(llm: LLM) -> torch.Tensor:
    settings = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    answer = llm.generate([{"prompt_token_ids": TOKENS}], settings, use_tqdm=False)[0]
    return torch.tensor([answer.prompt_logprobs[i][TOKENS[i]].logprob for i in range(1, len(TOKENS))])


def right_experts(llm: LLM, model: torch.nn.Module) -> float:
    """Of the experts that the server tells of the tokens of answers and their prompts, the share that
    transformers chooses.

    Two answers share a prompt, so one finds it in the cache; a third goes on behind what is known.
    """
    chosen: dict[int, torch.Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            number = int(name.split(".layers.")[1].split(".")[0])

            def note(_: torch.nn.Module, given: tuple, number: int = number) -> None:
                chosen[number] = next(one for one in given[1:] if not one.is_floating_point())

            hooks.append(module.register_forward_pre_hook(note))
    right, total, ids = 0, 0, TOKENS
    for start, count in ((0, 2), (len(TOKENS) + 7, 1)):
        settings = SamplingParams(
            max_tokens=8, n=count, seed=1, detokenize=False, routed_experts_prompt_start=start
        )
        prompt = {"prompt_token_ids": ids, "cache_salt": "of these weights"}
        answers = llm.generate([prompt], settings, use_tqdm=False)[0].outputs
        for answer in answers:
            whole = [*ids, *answer.token_ids]
            with torch.no_grad():
                model(torch.tensor([whole]), use_cache=False)
            told = torch.from_numpy(answer.routed_experts.astype("int64"))
            assert len(told) == len(whole) - 1 - start
            for number, own in chosen.items():
                same = told[:, number].sort().values == own[start : len(whole) - 1].sort().values
                right, total = right + int(same.sum()), total + same.numel()
        ids = whole
    for hook in hooks:
        hook.remove()
    return right / total


@contextlib.contextmanager
def loader_of(family: str) -> Iterator[None]:
    """vLLM's start; for `loaded_wrongly` with a mistake: two experts of the last layer are exchanged."""
    right = RepackableLoader.load_weights

    def load_weights(self: RepackableLoader, model: torch.nn.Module, config: ModelConfig) -> None:
        right(self, model, config)
        experts = [values for name, values in model.named_parameters() if name.endswith("w2_weight")][-1]
        experts.data[[0, 1]] = experts.data[[1, 0]]

    if family == "loaded_wrongly":
        RepackableLoader.load_weights = load_weights
    try:
        yield
    finally:
        RepackableLoader.load_weights = right


def digests(llm: LLM) -> list[dict[str, str]]:
    """Of all parameters."""
    return llm.collective_rpc("compute_weight_checksums")


def push(llm: LLM, folder: Path) -> None:
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", args=({"path": str(folder)},))
    llm.collective_rpc("finish_weight_update")


def verdict(family: str, folder: Path) -> dict:
    """Mean differences of logprobs: at the start, then given its own weights, others, and its own again.

    The last are under transformers' names, and in its layout. And which parameters the start has loaded
    otherwise than the first push.
    """
    folders = [families.make(family, folder / f"{family}-{seed}", seed) for seed in (1, 2)]
    models = [families.make_model(family, seed) for seed in (1, 2)]
    for model in models:
        model.set_attn_implementation("eager")  # the only one that caps attention
    own = folder / f"{family}-own"
    own.mkdir()
    tied = models[0].all_tied_weights_keys
    tensors = {name: tensor.clone() for name, tensor in models[0].state_dict().items() if name not in tied}
    save_file(tensors, own / "model.safetensors")
    expected = [reference(model) for model in models]
    more = {"scheduler_cls": EXPERTS_SCHEDULER, "async_scheduling": False} if family in TELLING else {}
    with loader_of(family):
        llm = LLM(
            str(folders[0]),
            load_format="cairn",
            dtype="float32",
            enforce_eager=True,
            hf_overrides=overrides(str(folders[0])),
            distributed_executor_backend="uni",
            kv_cache_memory_bytes=64 << 20,
            max_model_len=128,
            max_num_seqs=4,
            logprobs_mode="processed_logprobs",
            enable_chunked_prefill=False,
            enable_prefix_caching=family in TELLING,
            disable_log_stats=True,
            weight_transfer_config=WeightTransferConfig(backend="filesystem"),
            **more,
        )
    differences, held = [(served(llm) - expected[0]).abs().mean().item()], [digests(llm)]
    for seed, pushed in ((0, folders[0]), (1, folders[1]), (0, own)):
        push(llm, pushed)
        differences.append((served(llm) - expected[seed]).abs().mean().item())
        held.append(digests(llm))
    return {
        "differences": differences,
        "start_differs": differing(held[0], held[1]),
        "experts": right_experts(llm, models[0]) if more else 1.0,
    }


def main(folder: Path, names: list[str]) -> None:
    for family in names:
        began = time.monotonic()
        try:
            found = verdict(family, folder)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()  # only now nothing refers to the engine any more, not even a traceback
        cleanup_dist_env_and_memory()
        seconds = round(time.monotonic() - began, 1)
        print(json.dumps({"family": family, **found, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
