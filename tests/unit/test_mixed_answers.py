"""Tokens that go on from keys and values of earlier policies: as a server samples them, and replayed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from families import make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from tiny import write, write_adapter
from transformers import AutoModelForCausalLM, DynamicCache

from cairn.config.shared import RolloutKey
from cairn.run.messages import PolicyName
from cairn.tools.replay import mixed
from cairn.tools.replay.answers import MIXED, RolloutReplayed, SpanReplayed
from cairn.tools.replay.mixed import mixed_logprobs
from cairn.tools.replay.sampled import SampledSpan

Folders = dict[PolicyName, Path]
Models = dict[PolicyName, torch.nn.Module]
BLOCK = 16
"""Tokens of a block of the played server's cache."""


def policy(step: int) -> PolicyName:
    return PolicyName("5eed", "branch_1", step)


@pytest.fixture(scope="module", params=["qwen3", "gemma3_text"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Three policies; the second family has layers that see a window only."""
    folder = tmp_path_factory.mktemp("policies")
    return {
        policy(step): write(make_model(request.param, seed=step), folder / str(step)) for step in (1, 2, 3)
    }


@dataclass
class PlayedServer:
    """Samples token by token, and keeps the keys and values of whole blocks from request to request."""

    models: Models
    evicts: bool = False
    fed: list[int] = field(default_factory=list)
    cache: DynamicCache = field(default_factory=DynamicCache)
    draw: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))

    def request(
        self, context: list[int], policies: Sequence[tuple[int, int]], start: int
    ) -> list[SampledSpan]:
        """The spans of one request: so many tokens by each of these policies, new weights between them."""
        same = 0
        while same < min(len(self.fed), len(context) - 1) and self.fed[same] == context[same]:
            same += 1
        kept = 0 if self.evicts else same // BLOCK * BLOCK
        if kept:
            self.cache.crop(-(len(self.fed) - kept))
        else:
            self.cache = DynamicCache()
        ids, self.fed = context[kept:], list(context)
        spans: list[SampledSpan] = []
        for number, (step, count) in enumerate(policies):
            tokens, logprobs, before = [], [], list(self.fed)
            for _ in range(count):
                with torch.no_grad():
                    found = self.models[policy(step)](torch.tensor([ids]), past_key_values=self.cache)
                scores = found.logits[0, -1].log_softmax(-1)
                (token,) = torch.multinomial(scores.exp(), 1, generator=self.draw).tolist()
                tokens.append(token)
                logprobs.append(scores[token].item())
                self.fed.append(token)
                ids = [token]
            spans.append(
                SampledSpan(
                    turn=0, start=start, context=before, token_ids=tokens, logprobs=logprobs,
                    policy=policy(step), seed=None, begins=not number,
                )
            )  # fmt: skip
            start += count
        self.answer = list(self.fed)
        self.fed.pop()  # nobody has computed the last token's
        return spans


@pytest.fixture(scope="module")
def models(weights: Folders) -> Models:
    load = AutoModelForCausalLM.from_pretrained
    return {name: load(path, dtype="float32").eval() for name, path in weights.items()}


REQUESTS = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=2), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=12)
@given(REQUESTS, st.booleans(), st.integers(0, 40))
def test_any_requests_are_computed_as_the_server_has(
    weights: Folders, models: Models, requests: list[list[int]], evicts: bool, prompt: int
):
    """Whatever policies came when, and whether the server still had keys and values of earlier requests."""
    server = PlayedServer(models, evicts)
    context, spans, step, start = [5 + n % 50 for n in range(prompt + 1)], list[SampledSpan](), 1, 0
    for request in requests:
        policies = []
        for number, count in enumerate(request):
            step = min(step + number, 3)
            policies.append((step, count))
        spans += server.request(context, policies, start)
        context, start, step = server.answer, start + sum(request), min(step + 1, 3)
    spans = [replace(one, mixed=one.policy != spans[0].policy) for one in spans]
    found = mixed_logprobs([spans], weights, temperature=1.0, base=None, dtype="float32")
    assert found.keys() == {id(one) for one in spans if one.mixed}
    for one in spans:
        if one.mixed:
            torch.testing.assert_close(
                torch.tensor(found[id(one)]), torch.tensor(one.logprobs), atol=2e-5, rtol=1e-5
            )


def test_new_weights_in_the_middle_are_not_taken_for_a_prompt_of_theirs(weights: Folders, models: Models):
    """The logprobs that a policy gives depend on whose keys and values there are."""
    first, second = PlayedServer(models).request(list(range(5, 35)), [(1, 20), (3, 10)], 0)
    second = replace(second, mixed=True)
    ways = {}
    for begins in (False, True):  # a request of its own would have had its last block computed anew
        spans = [first, replace(second, begins=begins)]
        found = mixed_logprobs([spans], weights, temperature=1.0, base=None, dtype="float32")
        ways[begins] = RolloutReplayed(
            RolloutKey(1, 0, 0),
            "a server",
            [
                SpanReplayed(first, False, ("float32",), logprobs=first.logprobs),
                SpanReplayed(
                    spans[1], False, ("float32",), logprobs=found[id(spans[1])], by_transformers=True
                ),
            ],
        )
    assert ways[False].ok
    assert any(
        "10 logprobs of recorded tokens, from keys and values of earlier" in one
        for one in ways[False].lines(9)
    )
    assert not ways[True].ok
    assert "preemption" in ways[True].cause()
    assert "from token 20 of turn 0 on" in ways[True].cause()


@pytest.mark.parametrize("moved", [False, True])
def test_policies_that_are_adapters_have_the_weights_that_were_served(tmp_path: Path, moved: bool):
    """Their own, on the base that the run says; both are served as one merged model."""
    base = write(make_model("qwen3", seed=1), tmp_path / "base")
    adapters: Folders = {}
    served: Models = {}
    for step in (1, 2):
        folder = adapters[policy(step)] = tmp_path / f"adapter_{step}"
        about = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        served[policy(step)] = write_adapter(base, folder, step, about).merge_and_unload().eval()
    first, second = PlayedServer(served).request(list(range(5, 25)), [(1, 4), (2, 6)], 0)
    second = replace(second, mixed=True)
    elsewhere = base.rename(tmp_path / "elsewhere") if moved else None
    found = mixed_logprobs(
        [[first, second]],
        adapters,
        temperature=1.0,
        base=str(elsewhere) if elsewhere else None,
        dtype="float32",
    )
    assert found == {id(second): pytest.approx(second.logprobs, abs=2e-5)}


def test_what_follows_on_a_lost_policy_is_left_out(weights: Folders, models: Models):
    """And branches do not lose each other's."""
    spans = PlayedServer(models).request(list(range(5, 15)), [(1, 3), (2, 3), (3, 3)], 0)
    other = PlayedServer(models).request(list(range(20, 30)), [(1, 3), (3, 3)], 0)
    spans = [replace(one, mixed=one.policy.step > 1) for one in spans]
    spans += [replace(one, mixed=one.policy.step > 1, branch=1) for one in other]
    without = {name: path for name, path in weights.items() if name.step != 2}
    found = mixed_logprobs([spans], without, temperature=1.0, base=None, dtype="float32")
    assert found.keys() == {id(spans[-1])}
    assert "the weights of all of these policies are not there" in MIXED


def test_a_model_that_the_host_has_no_room_for_is_not_opened(
    weights: Folders, models: Models, monkeypatch: pytest.MonkeyPatch
):
    first, second = PlayedServer(models).request(list(range(5, 15)), [(1, 3), (2, 3)], 0)
    monkeypatch.setattr(mixed, "available_memory", lambda: 100_000)
    with pytest.raises(mixed.NotComputable, match=r"takes 0\.\d GB of host memory for a policy"):
        mixed_logprobs(
            [[first, replace(second, mixed=True)]], weights, temperature=1.0, base=None, dtype="float32"
        )


@pytest.mark.parametrize("family", ["mamba", "lfm2", "minimax"])
def test_a_model_that_keeps_other_things_than_keys_is_not_computed(tmp_path: Path, family: str):
    folder = write(make_model(family), tmp_path / "model")
    span = SampledSpan(0, 0, [5, 6], [7], [-1.0], policy(1), None, mixed=True)
    with pytest.raises(mixed.NotComputable, match="they come from a state"):
        mixed_logprobs([[span]], {policy(1): folder}, temperature=1.0, base=None, dtype="float32")


def test_logprobs_are_those_of_the_temperature(weights: Folders, models: Models):
    first, second = PlayedServer(models).request(list(range(5, 15)), [(1, 3), (2, 3)], 0)
    (cold,) = mixed_logprobs(
        [[first, replace(second, mixed=True)]], weights, temperature=0.5, base=None, dtype="float32"
    ).values()
    (warm,) = mixed_logprobs(
        [[first, replace(second, mixed=True)]], weights, temperature=1.0, base=None, dtype="float32"
    ).values()
    assert cold != pytest.approx(warm, abs=1e-3)
