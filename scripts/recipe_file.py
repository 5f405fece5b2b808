"""What a recipe.toml may say."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PACKAGE = r"([\w.-]+)==\S+$"
"""The end of what `uv pip install` is given for a package: its name and version."""


class Described(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stage(Described):
    """One command of a recipe.

    command: as typed in a shell, with {out}, its own folder; {NAME}, the folder of an earlier stage; {seed};
    {data.NAME}, what --data says; {package.NAME}, the folder of an installed package; {python}. once: it runs
    once, not for each seed. curve: the metric of metrics.jsonl that is recorded for each step, and drawn if
    `drawn`, as `label`. after: the stage behind whose last step this one's first step is drawn. also: metrics
    of which first and last values are recorded. evaluation: the command is `eval`, and results are recorded.
    """

    name: str
    command: str
    once: bool = False
    label: str = ""
    curve: str | None = None
    drawn: bool = False
    after: str | None = None
    also: list[str] = []
    evaluation: bool = False


class Recipe(Described):
    """recipe.toml.

    model: what is trained, as the results say it. axis: what the curves show. packages: modules that have to
    be installed, with what `uv pip install` is given for each. data: names of data that --data has to give,
    with what they are. check: the stages whose first steps are compared, and how many. equal: stages whose
    last steps hold the same weights. beside: two stages each, whose curves are compared step by step. open:
    why there are no results yet. note: what the numbers do not say of themselves.
    """

    title: str
    model: str
    axis: str
    stages: list[Stage]
    seeds: list[int] = [0, 1, 2]
    packages: dict[str, Annotated[str, Field(pattern=PACKAGE)]] = {}
    data: dict[str, str] = {}
    check: dict[str, int] = {}
    equal: list[list[str]] = []
    beside: list[tuple[str, str]] = []
    open: str = "not run yet"
    note: str = ""
