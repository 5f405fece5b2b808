"""Pictures of terminal and page for the documentation: `uv run python tests/pictures.py docs/images`.

They show recorded runs (`recorded_runs.py`) in a headless Chromium, as if these lay in somebody's home.
"""

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from browser import Browser, browser
from recorded_runs import busy, flat, make
from rich.console import Console
from served import served

from cairn.run.view import RunView
from cairn.watch.overview import overview
from cairn.watch.terminal import RunPanel

SIZE = (1120, 700)
"""Width and height of pictures of the page, in pixels; those of the terminal are as high as their text."""
VIEWS = {
    "dash": ("run=flat", "#view"),
    "dash_curves": ("run=busy", ".charts"),
    "dash_rollouts": ("run=busy&view=rollouts&step=40", "#view"),
}
"""What each picture of the page shows: the fragment of its address; where it is scrolled to."""
TERMINAL = """<html data-ready="1"><body style="margin:0;background:#10151c"><pre style="margin:0;
padding:18px 22px;color:#d7dde5;font:15px/1.45 'DejaVu Sans Mono',monospace">{code}</pre></body></html>"""
"""The page that a text of the terminal is drawn on."""

HOME = "/home/me"
MOVED = """(() => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) walk.currentNode.data = walk.currentNode.data.replaceAll("%s", "%s");
})()"""
"""What puts another path in the place of one."""


def draw(target: Path) -> None:
    """Write the pictures into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "outputs"
        flat(runs / "flat")
        busy(runs / "busy")
        make(runs / "sft", "sft", steps=30, loss=2.5)
        with served(runs) as address, browser(Path(folder)) as tab:
            for name, (fragment, place) in VIEWS.items():
                tab.size(*SIZE)
                tab.open(f"{address}#{fragment}")
                tab.wait("document.querySelector('.answer, .charts .value[data-exact]')")
                tab.run("new Promise(done => setTimeout(done, 1500))")  # until curves are drawn
                if place != "#view":
                    tab.run(f"document.querySelector('{place}').scrollIntoView()")
                tab.run(MOVED % (folder, HOME))
                tab.picture(target / f"{name}.png")
            for name, text in texts(runs).items():
                draw_text(tab, text, Path(folder) / f"{name}.html", target / f"{name}.png")


def texts(runs: Path) -> dict[str, str | RunPanel]:
    """What the terminal shows, by the name of the picture."""
    shown = overview(RunView(runs / "busy"), here="outputs/busy")
    command = [sys.executable, "-m", "cairn", "diagnose", "outputs/flat"]
    said = subprocess.run(command, cwd=runs.parent, capture_output=True, text=True, check=False).stdout
    findings, _, _ = said.partition("\na step takes")  # what follows is of time and tokens
    return {
        "watch": RunPanel(shown, "outputs/busy", notes=False),
        "diagnose": f"$ uv run diagnose outputs/flat\n{findings}\n...",
    }


def draw_text(tab: Browser, text: str | RunPanel, file: Path, picture: Path) -> None:
    """Draw a text as a terminal shows it."""
    console = Console(record=True, file=io.StringIO(), width=112, force_terminal=True, highlight=False)
    console.print(text, markup=False)
    file.write_text(console.export_html(inline_styles=True, code_format=TERMINAL))
    tab.size(*SIZE)
    tab.open(file.as_uri())
    tab.size(SIZE[0], tab.run("Math.ceil(document.querySelector('pre').getBoundingClientRect().height)"))
    tab.picture(picture)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
