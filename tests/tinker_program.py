"""A program of the real package tinker: trains and samples, and prints what came of it as JSON.

usage: tinker_program.py URL KEY
"""

import importlib
import json
import sys
from typing import Any

SAMPLES = ([10, 20, 30, 40, 50], [7, 8, 9])
PROMPT, TOKENS = [11, 22, 33], 6


def main(url: str, key: str) -> dict[str, Any]:
    """What a session of three steps gives."""
    tinker: Any = importlib.import_module("tinker")  # tests import this file, and do without the package
    types = tinker.types
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        for tokens in SAMPLES
    ]
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client = service.create_lora_training_client("tiny", rank=4, seed=2).result()
    losses = []
    for _ in range(3):
        passes = client.forward_backward(data, "cross_entropy")
        update = client.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passes.result().metrics["loss:sum"])
        update.result()
    state = client.save_state("three").result().path
    how = types.SamplingParams(max_tokens=TOKENS, seed=3)
    prompt = types.ModelInput.from_ints(PROMPT)
    path = client.save_weights_for_sampler("three").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    answers = sampler.sample(prompt, 2, how).result().sequences
    again = service.create_training_client_from_state_with_optimizer(state).result()
    loss = again.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
    custom = client.forward_backward_custom(data, lambda _, found: (-sum(one.sum() for one in found), {}))
    return {
        "losses": [*losses, loss],
        "custom": custom.result().metrics["loss:sum"],
        "tokens": [one.tokens for one in answers],
        "logprobs": [one.logprobs for one in answers],
        "scores": sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT + answers[0].tokens)).result(),
        "rank": client.get_info().lora_rank,
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
