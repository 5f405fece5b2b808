"""The commands `ckpt average` and `ckpt copy`: what is made of whole steps."""

import argparse
import contextlib
from pathlib import Path

from cairn.formats import WriteOptions
from cairn.formats.base import WEIGHT_DTYPES
from cairn.run.errors import UsageError
from cairn.run.progress import progress_bars
from cairn.tools.ckpt_formats import add_shards, step_in
from cairn.tools.ckpt_output import print_json, say
from cairn.tools.ckpt_remote import local, local_target, name_of, place, receive, upload


def add_average(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `ckpt average`."""
    command.add_argument(
        "steps", type=place, nargs="+", metavar="step", help="step_N folders or their URLs, two or more"
    )
    command.add_argument(
        "out", type=local_target, help="the folder to make; it appears when all of it is written"
    )
    kinds = command.add_mutually_exclusive_group()
    kinds.add_argument(
        "--weights",
        type=_numbers,
        metavar="W,W,...",
        help="the weight of each step, such as 1,2,1 (default: all the same); they are divided by their sum",
    )
    kinds.add_argument(
        "--ema",
        type=_decay,
        metavar="DECAY",
        help="exponential moving average over the steps in the order given, such as 0.9",
    )
    command.add_argument(
        "--dtype",
        choices=sorted(WEIGHT_DTYPES),
        help="data type of the weights (default: as in the last step)",
    )
    add_shards(command)
    command.add_argument(
        "--no-verify", action="store_true", help="don't read the result back to compare it with the average"
    )


def average(arguments: argparse.Namespace) -> int:
    """Run `ckpt average`."""
    with contextlib.ExitStack() as downloaded:
        places = [
            downloaded.enter_context(local(place, newest=True, near=arguments.out))
            for place in arguments.steps
        ]
        return _average([step_in(place) for place in places], arguments)


def _average(steps: list[Path], arguments: argparse.Namespace) -> int:
    from cairn.formats.transfer.average import average_steps, ema_weights  # imports torch

    out = arguments.out
    weights = arguments.weights or [1.0] * len(steps)
    if arguments.ema is not None:
        weights = ema_weights(len(steps), arguments.ema)
    options = WriteOptions(WEIGHT_DTYPES.get(arguments.dtype), arguments.shard_size)
    with progress_bars() as stage:
        found = average_steps(steps, weights, out, options, check=not arguments.no_verify, stage=stage)
    shares = [weight / sum(weights) for weight in weights]
    names = [name_of(given, step) for given, step in zip(arguments.steps, steps, strict=True)]
    if arguments.json:
        content = {"steps": names, "weights": shares, "folder": str(out)}
        print_json({**content, "check": found})
        return 0
    for name, share in zip(names, shares, strict=True):
        say(f"{share:8.4f}  {name}")
    say(
        f"{out} is a Hugging Face directory with their average ({found}): weights only, no optimiser's state;"
    )
    say(f"a new run begins from them with --model.name {out}")
    return 0


def add_copy(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `ckpt copy`."""
    command.add_argument(
        "step",
        type=place,
        help="a step_N folder, or an output folder (its newest good step), or the URL of one",
    )
    command.add_argument(
        "dest",
        type=place,
        help="an output folder, in whose checkpoints folder the copy is then, or the URL of a run",
    )
    command.add_argument(
        "--link", action="store_true", help="hard links instead of copies: no space, but damage is shared"
    )


def copy(arguments: argparse.Namespace) -> int:
    """Run `ckpt copy`.

    Raises:
        UsageError: links are wanted from or to an object store.
    """
    from cairn.checkpoint.fork import copy_step  # imports numpy, which would slow down --help

    given: Path | str = arguments.step
    dest: Path | str = arguments.dest
    folder: Path | str
    remote = [place for place in (given, dest) if isinstance(place, str)]
    if arguments.link and remote:
        raise UsageError(f"--link: {remote[0]} is a URL, where no hard links can be; leave out --link")
    with progress_bars() as stage:
        if isinstance(dest, str):
            with local(given, newest=True) as place:
                step_folder = step_in(place)
                folder, name = upload(step_folder, dest, stage), name_of(given, step_folder)
        elif isinstance(given, str):
            copied = receive(given, dest, stage)
            folder = copied
            name = name_of(given, copied)
        else:
            step_folder = step_in(given)
            folder, name = copy_step(step_folder, dest, link=arguments.link, stage=stage), str(step_folder)
    if arguments.json:
        print_json({"step": name, "folder": str(folder), "linked": arguments.link})
    else:
        say(f"{folder} is a copy of {name}, and verified")
    return 0


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 <= number < float("inf") for number in numbers) or not sum(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of weights; give one such as 1,2,1")
    return numbers


def _decay(text: str) -> float:
    try:
        decay = float(text)
    except ValueError:
        decay = -1.0
    if not 0 <= decay < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no decay; give a number from 0 to below 1")
    return decay
