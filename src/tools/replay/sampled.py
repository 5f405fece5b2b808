"""What a run has recorded of how an answer was sampled: by which policies, requests and seeds."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from cairn.config.environment import SamplingConfig
from cairn.config.inference import InferenceConfig
from cairn.config.rl import ServersConfig
from cairn.config.shared import RolloutKey
from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.run.errors import UsageError
from cairn.run.jsonlines import as_object
from cairn.run.messages import PolicyName
from cairn.run.seeds import answer_seed, turn_seed
from cairn.tools.replay.recorded import RecordedRun

NUMBER = re.compile(r"branch_([0-9]+)")
"""A branch's name, by the number of the attempt that began it."""


@dataclass(frozen=True)
class SamplingThen:
    """The settings by which a run had answers sampled.

    seed: of the run. temperature: of the sampling. chunk: tokens of a request. keeps_cache: whether an answer
    that goes on under another policy does so from keys and values of the earlier one. own: whether the run
    started its servers. server: their settings. base: where the run says that the base of its adapters is.
    """

    seed: int
    temperature: float
    chunk: int
    keeps_cache: bool
    own: bool
    server: InferenceConfig
    base: str | None = None

    @classmethod
    def of(cls, run: RecordedRun, step: int) -> "SamplingThen":
        """Those of the time of a step: from the next checkpoint's recipe, or else the newest attempt's."""
        later = (run.checkpoints.orchestrator_state(one) for one in run.saved if one >= step)
        record = next(filter(None, later), None)
        recipe = (record and record.recipe) or as_object(run.recipe().get("orchestrator"))
        settings = as_object(recipe.get("settings"))
        default = SamplingConfig()
        seed = record.seed if record and record.seed is not None else run.config.get("seed", 0)
        lora = as_object(run.trainer().get("lora"))
        server = as_object(run.config.get("inference")) if run.kind.sections else {}
        return cls(
            seed=int(seed),
            temperature=float(settings.get("sampling.temperature", default.temperature)),
            chunk=int(settings.get("sampling.chunk_tokens") or default.chunk),
            keeps_cache=(
                settings.get("max_off_policy_steps", 1) > 0
                and not settings.get("recompute_kv_cache", False)
                and lora.get("serve") != "unmerged"
            ),
            own=run.starts_servers,
            server=ServersConfig.model_validate(server, extra="ignore"),
            base=cast("str | None", lora.get("base")),
        )


@dataclass(frozen=True)
class SampledSpan:
    """Tokens that one policy has sampled for one request.

    turn: number of the answer among those of its rollout. branch: number of the answer's conversation. start:
    number of the answer's tokens before them. begins: whether their request began with them. context: all
    tokens that the server saw before them. token_ids, logprobs: as they are recorded, float32. policy: that
    sampled them. seed: with which they can be drawn again; None: they can't, for the reason `not_drawn`.
    first: whether they follow a prompt without earlier answers. mixed: whether they come from keys and values
    of an earlier policy.
    """

    turn: int
    start: int
    context: list[int] = field(repr=False)
    token_ids: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    policy: PolicyName
    seed: int | None
    not_drawn: str = ""
    first: bool = True
    mixed: bool = False
    branch: int = 0
    begins: bool = True


def recorded_rollout(kept: KeptRollouts, key: RolloutKey) -> Mapping[str, Any]:
    """A kept rollout.

    Raises:
        UsageError: there is none with this key.
        DamagedFile: the file of its step can't be read.
    """
    rows = kept.read(key.step)
    found = next((row for row in rows if (row["place"], row["sample"]) == (key.place, key.sample)), None)
    if found is None:
        steps = kept.steps()
        raise UsageError(
            f"--rollout {key}: there is no such rollout (STEP/PLACE/SAMPLE, as `rollouts "
            f"{kept.folder.parent}` shows them); steps {steps[0]} to {steps[-1]} are kept"
        )
    return found


def spans_of(row: Mapping[str, Any], then: SamplingThen) -> list[SampledSpan]:
    """A rollout's sampled tokens, in the order in which they are recorded."""
    found: list[SampledSpan] = []
    branches: dict[int, list[int]] = {}
    began: dict[int, str] = {}
    for number, turn in enumerate(row["turns"]):
        branch, tokens = turn["branch"], turn["token_ids"]
        context = [*branches.get(branch, [])[: turn["kept"]], *turn["prompt_ids"]]
        branches[branch] = context + tokens
        for request in range(0, len(tokens), then.chunk):
            seed = _seed(row, turn, request // then.chunk, then)
            for span in turn["versions"]:
                start, end = max(span["start"], request), min(span["end"], request + then.chunk)
                if start >= end:
                    continue
                first = began.setdefault(branch, span["version"])
                why = _not_drawn(turn, start, request)
                found.append(
                    SampledSpan(
                        turn=number,
                        start=start,
                        context=context + tokens[:start],
                        token_ids=tokens[start:end],
                        logprobs=turn["logprobs"][start:end],
                        policy=PolicyName.parse(span["version"]),
                        seed=None if why else seed,
                        not_drawn=why,
                        first=not number and not start,
                        mixed=then.keeps_cache and span["version"] != first,
                        branch=branch,
                        begins=start == request,
                    )
                )
    return found


def _seed(row: Mapping[str, Any], turn: Mapping[str, Any], chunk: int, then: SamplingThen) -> int:
    place, policy, sample = row["place"], row["policy_step"], row["sample"]
    if (call := turn.get("call")) is None:
        return answer_seed(then.seed, place, policy, chunk) + sample
    return turn_seed(then.seed, place, policy, sample, call, chunk)


def _not_drawn(turn: Mapping[str, Any], start: int, request: int) -> str:
    if "call" not in turn:
        return "an earlier version of Cairn has kept them, without what their seed derives from"
    if start != request:
        return "their request began under an earlier policy, with whose tokens its seed was used up"
    return ""


def is_same_policy(branch: str, made_by: str) -> bool:
    """Whether the policy of a step that a run's branch `branch` has served is that of the run's checkpoint of
    this step, which the branch `made_by` has.

    A branch that goes back behind a checkpoint has it set aside. So of a checkpoint that is there, whatever
    branch has begun later has it among its steps.
    """
    one, other = NUMBER.fullmatch(branch), NUMBER.fullmatch(made_by)
    return branch == made_by or (one is not None and other is not None and int(one[1]) > int(other[1]))
