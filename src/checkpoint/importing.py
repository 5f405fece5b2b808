"""Makes the first step of a new run from a checkpoint of another program."""

import importlib.metadata
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cairn.checkpoint.checksums import FileChecksum
from cairn.checkpoint.fork import check_empty, fresh_store
from cairn.checkpoint.formats import FORMATS, Content, Source, Stage, no_progress
from cairn.checkpoint.formats.content import listed
from cairn.checkpoint.formats.derived import Section
from cairn.checkpoint.formats.hub import Layout, Place, hub_layout
from cairn.checkpoint.formats.huggingface import COMPANIONS
from cairn.checkpoint.layout import TensorSpec
from cairn.checkpoint.manifest import CheckpointError, Manifest
from cairn.checkpoint.receipts import make_receipt
from cairn.checkpoint.step import MODEL, OPTIMIZER, TRAINER_STATE, TrainerRecord
from cairn.checkpoint.streaming import write_sources
from cairn.run.errors import UsageError
from cairn.run.files import make_folders, sync, write_json

NOT_OF_A_MODEL = {"trainer_state.json"}
"""Files beside a model that belong to its training."""


def import_checkpoint(
    source: Path,
    output_dir: Path,
    name: str,
    *,
    model: Path | None = None,
    step: int | None = None,
    stage: Stage = no_progress,
) -> tuple[Path, Manifest, Content]:
    """Write what `source` holds, in the format `name`, as the first step of a new run in `output_dir`.

    A process that is killed leaves a folder without a manifest, which is no step.

    Args:
        model: a folder with config.json and tokenizer; default: the one that belongs to the source.
        step: the number of the step; default: the source's, or 1 where it has none.

    Returns:
        The step's folder, its manifest, and the content of the source.

    Raises:
        UsageError: `output_dir` belongs to another run, or no configuration was found.
        CheckpointError: a tensor is missing, or has no place in the model; the message lists all of them.
        Damaged: the source is invalid, or holds what is not allowed in it.
        OSError: a file can't be read or written; the error names it.
    """
    from transformers import AutoConfig

    content = FORMATS[name].read(source)
    companions = model or content.model
    if companions is None or not (companions / "config.json").is_file():
        raise UsageError(
            f"{source}: has no config.json beside it; give the folder of its model with --model FOLDER"
        )
    layout = hub_layout(AutoConfig.from_pretrained(companions))  # pyright: ignore # typed in part
    number = content.step if step is None else step
    number = 1 if number is None else number
    if number < 1:
        raise UsageError(f"{source}: is of step {number}, before any update; use it with --model.name")
    tensors = {MODEL: weights_of(content.tensors[MODEL], layout, source)}
    files: dict[str, bytes] = {
        f"model/{path.name}": path.read_bytes()
        for path in sorted(companions.iterdir())
        if path.is_file() and path.suffix in COMPANIONS and path.name not in NOT_OF_A_MODEL
        if ".safetensors" not in path.name and not path.name.endswith(".bin.index.json")
    }
    parts = ["model"]
    if state := content.tensors.get(OPTIMIZER):
        tensors[OPTIMIZER] = state_of(state, layout, source)
        parts = ["trainer"]
        record = TrainerRecord(
            progress={
                "step": number,
                "total_tokens": content.tokens or 0,
                "total_samples": content.samples or 0,
            },
            optimizer=content.optimizer,
            recipe={"settings": dict(content.settings)},
        )
        files[TRAINER_STATE] = record.to_json()
    store = fresh_store(output_dir)
    make_folders(store.root)
    session = secrets.token_hex(8)
    about: dict[str, Any] = {
        "run_id": secrets.token_hex(4),
        "attempt": 0,
        "branch": "branch_1",
        "parent": None,
        "parts": parts,
        "world_size": 1,
        "dtypes": {
            stem: "+".join(sorted({tensor.spec.dtype for tensor in named.values()}))
            for stem, named in tensors.items()
        },
        "metrics": {},
        "versions": {"cairn": importlib.metadata.version("cairn")},
        "config_digest": "",
    }
    with store.alone():
        check_empty(store, output_dir)
        store.begin(number, [stem.partition("/")[0] for stem in tensors], session)
        folder = store.folder(number)
        try:
            written: dict[str, FileChecksum] = {}
            for stem, named in tensors.items():
                where, _, short = stem.rpartition("/")
                progress = stage(f"writing {stem}", sum(tensor.spec.nbytes for tensor in named.values()))
                sums = write_sources(folder / where, named, short, on_bytes=progress)
                written |= {f"{where}/{file}": checksum for file, checksum in sums.items()}
            store.write_part(number, "files", files, session)
            write_json(store.receipt_file(number, "tensors"), make_receipt(session, written), durable=True)
            for path in sorted(folder.iterdir()):
                sync(path)
            manifest = store.commit(number, {"files": session, "tensors": session}, timeout=60.0, about=about)
        except BaseException:
            if not store.exists(number):
                shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder, manifest, content


def weights_of(found: Mapping[str, Source], layout: Layout, where: Path) -> dict[str, Source]:
    """A model's weights by the hub's names, from those with any names that transformers knows.

    Raises:
        CheckpointError: some are missing, have another shape, or have no place in the model.
    """
    places = _places(found, layout, where)
    exact = {places[name]: source for name, source in found.items() if name in places}
    whole = {place.name: source for place, source in exact.items() if _is_whole(place, layout)}
    weights: dict[str, Source] = {}
    missing: list[str] = []
    for name, place in layout.places.items():
        if place in exact:
            weights[name] = exact[place]
        elif place.name in whole:
            source = whole[place.name]
            weights[name] = Section(source, place.first, TensorSpec(name, source.spec.dtype, place.shape))
        else:
            missing.append(name)
    _refuse(missing, where, "these weights of the model are missing")
    return weights


def state_of(found: Mapping[str, Source], layout: Layout, where: Path) -> dict[str, Source]:
    """The optimiser's state by transformers' names, from that with any names that transformers knows.

    Raises:
        CheckpointError: some of it is missing, has another shape, or has no place in the model.
    """
    kinds: dict[str, dict[str, Source]] = {}
    for name, source in found.items():
        weight, _, kind = name.rpartition(".")
        kinds.setdefault(kind, {})[weight] = source
    state: dict[str, Source] = {}
    for kind, by_weight in kinds.items():
        shaped = {name: source for name, source in by_weight.items() if kind != "step"}
        places = _places(shaped, layout, where) if shaped else layout.find(by_weight.keys())
        whole = {places[name].name: source for name, source in by_weight.items() if name in places}
        cut = [name for name in by_weight if name in places and not _is_whole(places[name], layout)]
        _refuse(cut, where, "the optimiser's state of these is that of parts of what transformers trains")
        state |= {f"{name}.{kind}": source for name, source in whole.items()}
        _refuse(
            sorted(layout.shapes.keys() - layout.buffers - whole.keys()),
            where,
            f"the optimiser's {kind} is missing for these weights",
        )
    return state


def _places(found: Mapping[str, Source], layout: Layout, where: Path) -> dict[str, Place]:
    """The place of each tensor; copies of tied ones have none.

    Raises:
        CheckpointError: a tensor has another shape than its place, or no place.
    """
    places = {name: place for name, place in layout.find(found.keys()).items() if name in found}
    tied = layout.tied.keys() | layout.tied_in_memory.keys()
    unknown = sorted(found.keys() - places.keys() - tied)
    _refuse(unknown, where, "these tensors have no place in the model that config.json describes")
    other = [
        f"{name} {list(found[name].spec.shape)} instead of {list(place.shape)}"
        for name, place in places.items()
        if found[name].spec.shape != place.shape
    ]
    _refuse(other, where, "these tensors have another shape than config.json says")
    return places


def _is_whole(place: Place, layout: Layout) -> bool:
    return place.shape == layout.shapes[place.name]


def _refuse(names: Sequence[str], where: Path, what: str) -> None:
    """Raise an error that lists `names`, if there are any.

    Raises:
        CheckpointError: there are some.
    """
    if names:
        raise CheckpointError(f"{where}: {what}: {listed(names)}")
