"""Problems from a data set, and rewards from functions."""

import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cairn.orchestrator.environments.calls import MAX_TURNS
from cairn.orchestrator.environments.protocol import Rewards
from cairn.orchestrator.environments.reward_functions import RewardFunction, awaited, make_reward_functions
from cairn.orchestrator.environments.trl_env_factory import load_factory, own_reward, tools_of
from cairn.run.data_sets import (
    BadRecord,
    DataSetPart,
    content_digest,
    every,
    kind_of,
    load_records,
    what_is_read,
)
from cairn.run.extensions import code_of

logger = logging.getLogger(__name__)

Message = dict[str, Any]


@dataclass(frozen=True)
class ProblemSource:
    """Where the problems are read from; see `DataSource`."""

    name: str
    split: str
    csv_numbers: Sequence[str] = ()
    split_setting: str = "orchestrator.environment.args.split"
    part: DataSetPart | None = None


class DataSet:
    """Each record of a data set is a problem; the reward is a weighted sum of functions.

    Args:
        data: a .jsonl, .json, .parquet or .csv file, a folder of such files or from `save_to_disk`, or a name
            on the hub.
        rewards: the functions, none if the objects of environment_factory have get_reward; for each its name
            (exact_match, or module:function), or a table with `function`, `weight`, `args` and `group`. They
            are called as TRL calls them, with lists: prompts, completions, and every column of the data set
            by its name. The lists have one element, or with `group = true`, for functions that compare
            answers, one for each answer to the prompt.
        split: of the data set, or a slice of it such as train[:1000].
        csv_numbers: columns of CSV files that are numbers, or true and false; all others are text.
        prompt: the column that asks: text, or a list of messages.
        template: text that asks instead, with columns in braces, such as "{question} Answer with a number."
        system: a system prompt, put before conversations that have none.
        examples: answered questions to put before each, as tables with `prompt` and `completion`.
        environment_factory: module:Class, called without arguments for each rollout, as TRL does:
            `reset(**record)` begins a problem, the other public methods are tools.
        max_turns: with it, the maximum number of answers of a rollout.

    Raises:
        BadRecord: the data set can't be read, or a record asks nothing.
        ValueError: an argument is wrong, or a function asks for what there is not.
        BadExtension: a function can't be imported.
    """

    def __init__(
        self,
        data: str,
        rewards: Sequence[str | Mapping[str, Any]] = (),
        *,
        split: str = "train",
        csv_numbers: Sequence[str] = (),
        prompt: str = "prompt",
        template: str | None = None,
        system: str | None = None,
        examples: Sequence[Mapping[str, str]] = (),
        environment_factory: str | None = None,
        max_turns: int = MAX_TURNS,
    ):
        self._made_by = ""
        self._source = ProblemSource(data, split, csv_numbers)
        self._records = load_records(self._source)
        if said := what_is_read(self._source):
            logger.info("%s", said)
        self._prompt, self._template = prompt, template
        self._before: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._examples = [message for example in examples for message in _turns(example)]
        columns = list(self._records.columns)
        self._fields: dict[str, None] = dict.fromkeys(columns)
        if template is None and prompt not in columns:
            raise ValueError(
                f"{data} has no column {prompt!r}; its columns are {', '.join(columns)}. Name the one that "
                "asks with prompt, or write a template with columns in braces"
            )
        self._columns = [column for column in columns if template is not None or column != prompt]
        offered = ["prompts", "completions", *self._columns]
        self.environment_factory: Callable[[], Any] | None = None
        self.max_turns, own = max_turns, list[RewardFunction]()
        if environment_factory is not None:
            self.environment_factory = load_factory(environment_factory)
            one = self.environment_factory()
            self.tools, own = tools_of(one), own_reward(environment_factory, one)
            self._made_by = f"{environment_factory} {max_turns} {code_of(environment_factory)}"
            offered.append("environments")
        self._rewards: list[RewardFunction] = own
        if rewards or not own:
            self._rewards = [*make_reward_functions(rewards, offered), *own]
        if self._compares and self.environment_factory is not None:
            raise ValueError(
                "a reward with group = true compares the answers to a prompt, and environment_factory "
                "rewards each rollout by itself: leave out one of them"
            )
        self._check_prompts()
        self.identity = self._identity()
        """Changes with the records, the functions' code and their settings."""

    def __len__(self) -> int:
        return len(self._records)

    def record(self, problem: int) -> dict[str, Any]:
        """All columns of a problem; one that its record lacks is None."""
        return {**self._fields, **self._records.read([problem])[0]}

    def messages(self, problem: int) -> list[Message]:
        """The record's question, after the system prompt and the examples."""
        return self._conversation(self._question(self.record(problem)))

    def reward(self, problem: int, answer: str) -> Rewards | Awaitable[Rewards]:
        """What the functions give, by their names; None where they do not apply.

        Raises:
            ValueError: a function returns neither a number nor None.
        """
        question = self._question(self.record(problem))
        if isinstance(question, str):
            return self.rewarded(problem, question, answer)
        answered = [{"role": "assistant", "content": answer}]
        return self.rewarded(problem, self._conversation(question), answered)

    @property
    def _compares(self) -> bool:
        """Whether a function is given all answers to a prompt at once."""
        return any(one.group for one in self._rewards)

    @property
    def rewards(self) -> Callable[[int, Sequence[str]], Any] | None:
        """What rewards all answers to a problem at once, if a function compares them; None otherwise."""
        return self._reward_group if self._compares else None

    def _reward_group(self, problem: int, answers: Sequence[str]) -> Any:
        """What the functions give each answer, by their names, as in `reward`."""
        record = self.record(problem)
        question = self._question(record)
        prompt: Any = question
        completions: list[Any] = list(answers)
        if not isinstance(question, str):
            prompt = self._conversation(question)
            completions = [[{"role": "assistant", "content": answer}] for answer in answers]
        found = [
            [function(self._offered(record, prompt, part)) for part in self._parted(function, completions)]
            for function in self._rewards
        ]
        if any(isinstance(one, Awaitable) for returned in found for one in returned):
            return self._group_later(found, len(answers))
        return self._group_parts(found, len(answers))

    @staticmethod
    def _parted(function: RewardFunction, completions: list[Any]) -> list[list[Any]]:
        """The completions of each call: all, or one."""
        return [completions] if function.group else [[one] for one in completions]

    def _offered(
        self, record: Mapping[str, Any], prompt: Any, completions: list[Any]
    ) -> dict[str, list[Any]]:
        count = len(completions)
        columns = {column: [record[column]] * count for column in self._columns}
        return columns | {"prompts": [prompt] * count, "completions": completions}

    async def _group_later(self, found: Sequence[Sequence[Any]], count: int) -> list[Rewards]:
        return self._group_parts([await awaited(returned) for returned in found], count)

    def _group_parts(self, found: Sequence[Sequence[Any]], count: int) -> list[Rewards]:
        values = {
            one.name: one.values_of(returned[0], count) if one.group else list(map(one.value_of, returned))
            for one, returned in zip(self._rewards, found, strict=True)
        }
        weights = {one.name: one.weight for one in self._rewards}
        return [
            Rewards({name: of_all[number] for name, of_all in values.items()}, weights)
            for number in range(count)
        ]

    def rewarded(
        self, problem: int, prompt: Any, completion: Any, further: Mapping[str, Sequence[Any]] | None = None
    ) -> Rewards | Awaitable[Rewards]:
        """As `reward`, of a prompt and a completion that are both text or both messages.

        Args:
            further: what functions may ask for besides, as lists with one element.
        """
        record = self.record(problem)
        offered = {**self._offered(record, prompt, [completion]), **(further or {})}
        found = [function(offered) for function in self._rewards]
        if any(isinstance(one, Awaitable) for one in found):
            return self._later(found)
        return self._parts(found)

    async def _later(self, found: Sequence[Any]) -> Rewards:
        return self._parts(await awaited(found))

    def _parts(self, found: Sequence[Any]) -> Rewards:
        values = {
            one.name: one.value_of(returned) for one, returned in zip(self._rewards, found, strict=True)
        }
        return Rewards(values, {one.name: one.weight for one in self._rewards})

    def _question(self, record: Mapping[str, Any]) -> Any:
        """What the record asks: text, or a list of messages."""
        if self._template is None:
            return record[self._prompt]
        try:
            return self._template.format_map(record)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            columns = ", ".join(record)
            raise ValueError(
                f"the template {self._template!r} fails: {error!r}; the columns are {columns}, and a brace "
                "that is meant as such is written twice"
            ) from None

    def _check_prompts(self) -> None:
        """Check that every record asks something.

        Raises:
            BadRecord: naming the first that does not.
        """
        for number, record in enumerate(every(self._records)):
            if wrong := _wrong_with(self._question({**self._fields, **record})):
                raise BadRecord(f"{self._records.where(number)}: {wrong}")

    def _conversation(self, question: Any) -> list[Message]:
        if isinstance(question, str):
            return [*self._before, *self._examples, {"role": "user", "content": question}]
        messages = [{key: value for key, value in one.items() if value is not None} for one in question]
        first = 1 if messages[0]["role"] == "system" else 0
        before = messages[:first] or self._before
        return [*before, *self._examples, *messages[first:]]

    def _identity(self) -> str:
        about = [content_digest(self._records), *(one.identity for one in self._rewards)]
        about += [self._made_by] if self._made_by else []
        return hashlib.blake2b("\n".join(about).encode(), digest_size=16).hexdigest()


def _turns(example: Mapping[str, str]) -> list[Message]:
    if set(example) != {"prompt", "completion"}:
        raise ValueError(f"an example has a prompt and a completion, and not {sorted(example)}")
    return [
        {"role": "user", "content": example["prompt"]},
        {"role": "assistant", "content": example["completion"]},
    ]


def _wrong_with(question: Any) -> str | None:
    if isinstance(question, str):
        return None if question.strip() else "its prompt is empty"
    if not isinstance(question, list) or not question:
        return f"its prompt is {kind_of(question)}; it must be text, or a list of messages"
    for message in question:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return 'its prompt must be text, or messages such as {"role": "user", "content": "..."}'
    if question[-1]["role"] == "assistant":
        return "its prompt ends with the assistant's turn: remove that message, or put it in another column"
    return None
