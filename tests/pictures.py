"""Pictures of the page for the documentation: `uv run python tests/pictures.py docs/images [WIDTH HEIGHT]`.

They show recorded runs (`recorded_runs.py`) in a headless Chromium, as if these lay in somebody's home.
"""

import sys
import tempfile
from pathlib import Path

from browser import browser
from recorded_runs import busy, flat, make
from served import served

VIEWS = {"dash": "run=flat", "dash_rollouts": "run=busy&view=rollouts&step=40"}
"""What each picture shows, as the fragment of its address."""

HOME = "/home/me"
MOVED = """(() => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) walk.currentNode.data = walk.currentNode.data.replaceAll("%s", "%s");
})()"""
"""What puts another path in the place of one."""


def draw(target: Path, width: int, height: int) -> None:
    """Write the pictures into a folder, in pixels of this size."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "outputs"
        flat(runs / "flat")
        busy(runs / "busy")
        make(runs / "sft", "sft", steps=30, loss=2.5)
        with served(runs) as address, browser(Path(folder)) as tab:
            tab.size(width, height)
            for name, fragment in VIEWS.items():
                tab.open(f"{address}#{fragment}")
                tab.wait("document.querySelector('.answer, .charts .value[data-exact]')")
                tab.run("new Promise(done => setTimeout(done, 1500))")  # until curves are drawn
                tab.run(MOVED % (folder, HOME))
                tab.picture(target / f"{name}.png")
                print(target / f"{name}.png")


if __name__ == "__main__":
    where, *size = sys.argv[1:]
    draw(Path(where), *(map(int, size) if size else (1120, 700)))
