"""What benchmarks/parity.py gives to TRL of Cairn's runs, and the losses that formulas make of it."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trl_runs

REPOSITORY = Path(__file__).resolve().parents[1]
TASK = "configs/reverse_text"
PROBLEMS = {"problems": 4096, "min_length": 3, "max_length": 8, "seed": 1}
PROMPTS, ANSWERS, MAX_TOKENS = 16, 8, 12
"""Of each step with rewards: prompts, answers to each, tokens of an answer at most."""


def write_records(kind: str, path: Path, steps: int) -> int:
    """Write the records that Cairn takes in these steps, in its order; returns how many a step takes."""
    import tomllib

    from cairn.config.data import SFTDataConfig
    from cairn.config.preferences import PreferenceDataConfig
    from cairn.trainer.data.opening import RecordOrder
    from cairn.trainer.data.preference_forms import FORMS
    from cairn.trainer.data.sources import SFT

    settings = tomllib.loads((REPOSITORY / TASK / f"{kind}.toml").read_text())["data"]
    config, use = (
        (SFTDataConfig(**settings), SFT)
        if kind == "sft"
        else (PreferenceDataConfig(**settings), FORMS["pairs"])
    )
    order = RecordOrder(config, use, 0, 0)
    with path.open("w") as out:
        for label, number in order.take(steps * config.batch_size):
            (record,) = order.sources[label].read([number])
            if kind == "sft":
                *prompt, answer = record["messages"]
                record = {"prompt": prompt, "completion": [answer]}
            out.write(json.dumps(record) + "\n")
    return config.batch_size


def write_prompts(path: Path, seed: int, steps: int) -> None:
    """Write prompts for so many steps of TRL's GRPO, in an order of the seed's."""
    from cairn.run.seeds import permutation

    environment = trl_runs.environment_of(PROBLEMS)
    numbers = permutation(len(environment), seed, "prompts for TRL")[: steps * PROMPTS]
    prompts = [{"prompt": environment.messages(i), "problem": i} for i in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts))


def centred(rewards: Sequence[float]) -> list[float]:
    """Advantages of a group without a divisor: Cairn's `dr_grpo`, and TRL's with scale_rewards='none'."""
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


def scaled(rewards: Sequence[float]) -> list[float]:
    """Those of Cairn's `grpo`: divided by the standard deviation, and 0 if that is rounding."""
    spread = statistics.stdev(rewards)
    return [one / spread if spread > 1e-6 else 0.0 for one in centred(rewards)]


def scaled_by_trl(rewards: Sequence[float]) -> list[float]:
    """Those of TRL's scale_rewards='group', in float32: the mean's rounding is divided by 1e-4 as well."""
    import torch

    of_group = torch.tensor(rewards)
    return ((of_group - of_group.nanmean()) / (of_group.std() + 1e-4)).tolist()


@dataclass(frozen=True)
class Answers:
    """The answers that a run was trained on: of each step, rows of `Run.rollouts`, group by group."""

    steps: list[list[dict[str, Any]]]

    @classmethod
    def of(cls, run: Path) -> "Answers":
        """Those that are kept in the run's directory."""
        import cairn

        frame = cairn.Run(run).rollouts(turns=True).sort_values(["step", "place", "sample"])
        return cls([rows.to_dict("records") for _, rows in frame.groupby("step")])

    def write(self, data: Path, answers: Path) -> None:
        """Write the prompts in their order, and the answers for `trl_runs.Recorded`."""
        environment = trl_runs.environment_of(PROBLEMS)
        with data.open("w") as prompts, answers.open("w") as out:
            for rows in self.steps:
                for row in rows[::ANSWERS]:
                    problem = int(row["problem"])
                    prompts.write(
                        json.dumps({"prompt": environment.messages(problem), "problem": problem}) + "\n"
                    )
                turns = [row["turns"][0] for row in rows]
                line = {
                    name: [list(map(float if name == "logprobs" else int, turn[name])) for turn in turns]
                    for name in ("prompt_ids", "token_ids", "logprobs")
                }
                out.write(json.dumps(line) + "\n")

    def losses(
        self, advantages: Callable[[Sequence[float]], list[float]], parts: int = 1, *, by_mean: bool = False
    ) -> list[float]:
        """The loss of each step's first update by the formula, at a ratio of 1: minus the mean advantage.

        Args:
            advantages: of a group's rewards.
            parts: mini-batches; the first update learns from the first.
            by_mean: divide by the mean number of tokens of the parts, and not by those of the part.
        """
        found = []
        for rows, tokens in zip(self.steps, self.tokens(parts), strict=True):
            groups = [rows[first : first + ANSWERS] for first in range(0, len(rows), ANSWERS)]
            each = [one for group in groups for one in advantages([float(row["reward"]) for row in group])]
            total = sum(_length(row) * one for row, one in zip(rows[::parts], each[::parts], strict=True))
            found.append(-total / (statistics.fmean(tokens) if by_mean else tokens[0]))
        return found

    def tokens(self, parts: int) -> list[list[int]]:
        """Of each step, the tokens of each mini-batch, to which every so many-th answer belongs."""
        return [[sum(map(_length, rows[first::parts])) for first in range(parts)] for rows in self.steps]

    def unevenness(self, parts: int) -> float:
        """The largest relative difference of a mini-batch's number of tokens and the mean of its step."""
        return max(abs(one / statistics.fmean(tokens) - 1) for tokens in self.tokens(parts) for one in tokens)


def _length(row: dict[str, Any]) -> int:
    return len(row["turns"][0]["token_ids"])
