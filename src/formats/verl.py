"""The folders of verl and SkyRL, in which each rank of FSDP2 saved its own shards with `torch.save`."""

from pathlib import Path

from cairn.formats.base import Content
from cairn.formats.verl_places import places_in


class Verl:
    """A run's folder (its newest step), a `global_step_N`, or the `actor` or `policy` in it."""

    def detect(self, source: Path) -> bool:
        return places_in(source) is not None

    def read(self, source: Path, model: Path | None = None) -> Content:
        from cairn.formats.verl_reading import read  # imports torch

        places = places_in(source)
        if places is None:
            raise FileNotFoundError(2, "holds no model_world_size_W_rank_R.pt", str(source))
        return read(places, model)
