"""Settings of records to train on, one data set or several with weights, and of validation."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from cairn.config.environment import LABEL
from cairn.config.settings import BaseConfig, ExistingPath, refuse_twins, separate

if TYPE_CHECKING:
    from cairn.run.data_sets import DataSetPart

ENDINGS = r"(\.(jsonl|ndjson|json|parquet|csv))?(\.(gz|bz2|xz|zst))?$"


class DataSetConfig(BaseConfig):
    """Where the records of a data set are, and how they are read."""

    name: ExistingPath = ""
    """A .jsonl, .json, .parquet or .csv file, a folder of such files or from save_to_disk, or a hub name."""
    split: str = "train"
    """Split to train on, or a slice of it such as train[:1000]; a single file has only train."""
    read: Literal["indexed", "stream"] = "indexed"
    """stream: read in order while training, and never as a whole; indexed: any record at any time."""

    csv_numbers: list[str] = []
    """Columns of CSV files that are numbers, or true and false; all others are text."""

    @property
    def split_setting(self) -> str:
        """What sets the split, as messages show it."""
        return "--data.split"

    @property
    def part(self) -> "DataSetPart | None":
        """The part of the split that is read; None: all of it."""
        return None

    @model_validator(mode="after")
    def _streams_have_no_slices(self) -> "DataSetConfig":
        if self.read == "stream" and "[" in self.split:
            raise ValueError(
                f'split = "{self.split}" is a part of a split, and a data set read as a stream has no parts: '
                'give a whole split, or read = "indexed"'
            )
        return self


class MixedDataConfig(DataSetConfig):
    """One of several data sets."""

    label: str | None = Field(default=None, pattern=LABEL)
    """What metrics and messages call it: letters, digits and _.- only (default: the name's last part)."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the records of a batch, in relation to the weights of the other data sets."""

    @property
    def called(self) -> str:
        """What metrics and messages call it."""
        last = re.sub(ENDINGS, "", Path(self.name).name, flags=re.IGNORECASE)
        return self.label or re.sub(r"[^A-Za-z0-9_.-]", "_", last).lstrip("_.-")[:64] or "data"

    @property
    def split_setting(self) -> str:
        return f"split of data.sets ({self.called})"

    @model_validator(mode="after")
    def _has_a_name(self) -> "MixedDataConfig":
        if not self.name:
            raise ValueError("each of data.sets needs a name: a file, a folder, or a data set on the hub")
        return self


class RecordsConfig(DataSetConfig):
    """Records to train on: of one data set, or of several with weights."""

    sets: list[MixedDataConfig] = []
    """Several data sets in place of `name`, as [[data.sets]] tables; see docs/how-to/data-files.md."""
    batch_size: int = Field(default=64, ge=1)
    """Records per optimiser step, over all ranks."""
    shuffle: bool = True
    """Shuffle the records anew in every epoch, by the seed; off: keep the file's order."""
    shuffle_block: int = Field(default=1000, ge=1)
    """Records of a stream that are shuffled among each other, one such block after the other."""
    unreadable: Literal["error", "drop"] = "error"
    """What becomes of records that can't be learned from, such as those that the chat template refuses."""
    ignore: list[str] = []
    """Fields of messages that may be left out, if the chat template does not show them."""

    @property
    def setting(self) -> str:
        """What sets the data, as messages show it."""
        return "data.sets:" if self.sets else "--data.name"

    @property
    def names(self) -> str:
        """The data sets, as messages show them."""
        return ", ".join(one.name for one in self.sets) or self.name

    @property
    def all_sets(self) -> Sequence[DataSetConfig]:
        """The data sets, which may be a single one."""
        return self.sets or [self]

    @property
    def streams(self) -> list[str]:
        """The data sets that are read as streams."""
        return [one.name for one in self.all_sets if one.read == "stream"]

    @field_validator("sets")
    @classmethod
    def _labels_of_their_own(cls, value: list[MixedDataConfig]) -> list[MixedDataConfig]:
        refuse_twins("data sets", "label", [one.called for one in value])
        return value

    @model_validator(mode="after")
    def _one_or_several(self) -> "RecordsConfig":
        if self.sets and (self.name or self.split != "train" or self.read != "indexed"):
            several = ", ".join(one.called for one in self.sets)
            raise ValueError(
                f"data.name, data.split or data.read beside data.sets ({several}): give one data set, or "
                "several with name, split and read of their own, not both"
            )
        return self


class SFTDataConfig(RecordsConfig):
    """Training records, each with `messages` or `conversations`, or with `prompt` and `completion`."""

    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Share of the records that is never trained on: of them are [[validation]] tables without data."""
    epochs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Length of the run, in place of max_steps: passes over one indexed data set, up to a whole step."""
    learn: list[str] = ["assistant"]
    """Roles whose turns are learned; `train` or `weight` of a message has precedence."""
    too_long: Literal["cut", "drop", "error"] = "cut"
    """What becomes of samples of more than seq_len tokens; in place of dropped records others are drawn."""

    @property
    def part(self) -> "DataSetPart | None":
        """The records that are not held out."""
        from cairn.run.data_sets import DataSetPart

        return DataSetPart(self.held_out, held_out=False) if self.held_out else None

    @field_validator("learn")
    @classmethod
    def _separate(cls, value: list[str]) -> list[str]:
        if not (roles := separate(value)):
            raise ValueError('nothing would be learned: name a role, such as "assistant"')
        return roles

    @model_validator(mode="after")
    def _held_out_of_one(self) -> "SFTDataConfig":
        if self.held_out and (self.sets or self.read == "stream"):
            raise ValueError(
                f"held_out = {self.held_out} is a share of a single data set, not read as a stream; give "
                "[[validation]] tables data of their own"
            )
        return self

    @model_validator(mode="after")
    def _epochs_have_a_length(self) -> "SFTDataConfig":
        if self.epochs is not None and (self.sets or self.read == "stream"):
            what = "each of data.sets has its own epochs" if self.sets else "a stream's length is unknown"
            raise ValueError(f"data.epochs = {self.epochs:g}: {what}; give max_steps instead")
        return self


class HeldOutPart(SFTDataConfig):
    """The records that are held out of training data."""

    @property
    def part(self) -> "DataSetPart":
        from cairn.run.data_sets import DataSetPart

        return DataSetPart(self.held_out, held_out=True)


# Settings of validation: the loss of held-out records, which are never trained on.


class HeldOutDataConfig(BaseConfig):
    """Where held-out records are."""

    name: ExistingPath
    """Like data.name: a file, a folder, or a name on the hub."""
    split: str = "train"
    """Split to validate on, or a slice of it such as train[95%:]; a single file has only train."""


class ValidationConfig(BaseConfig):
    """Records whose loss is measured at an interval."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Names the validation in evals.jsonl and metrics: letters, digits and _.- only."""
    data: HeldOutDataConfig | None = None
    """The records (default: those that data.held_out leaves out of training)."""
    interval: int = Field(default=50, ge=1)
    """Validate after every N steps."""
    at_start: bool = False
    """Also validate the model that the run starts from, as step 0."""
    at_end: bool = True
    """Also validate after the run's last step."""
    records: int | None = Field(default=None, ge=1)
    """Only the first N records (default: all)."""
    patience: int | None = Field(default=None, ge=1)
    """End the run when so many validations in a row, at the interval, have had no lower loss than before."""
