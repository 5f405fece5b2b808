"""Tables of the commands' output, as wide as the terminal and no wider.

Every table of the product is printed here. A number is never broken across lines: `0.1917 ± 0.12`, `12.3 MB`
and `12/190/3` stay whole. What is too wide is narrowed in this order, until it fits:

1. headers continue on further lines, between words;
2. columns of text are cut (`Cut`) or continue on further lines, between words;
3. rows become columns, as many side by side as fit, with the headers in front of each line.
"""

import os
import re
import sys
from collections.abc import Iterable, Sequence

from cairn.run.output import printable

WIDE = 1000
"""Width of the output in columns if it is not a terminal."""
GAP = 2
"""Spaces between columns."""
TEXT = 12
"""A column of long text is not made narrower than this, nor any column than its longest number."""
LONG = 24
"""Columns from which on text is long."""
CUT = 10
"""A column whose cells take one line is not made narrower than this."""

NUMBER = r"[-+]?\d[\d,.]*(?:[eE][-+]?\d+)?"
UNITS = r"(?:%|[kMGTP]?i?B|bytes|µs|ms|s|min|h|d)(?=\s|$)"
ATOM = re.compile(
    rf"{NUMBER}(?:\s±\s{NUMBER})?\s{UNITS}"  # 12.3 MB
    rf"|{NUMBER}\s±\s{NUMBER}"
    r"|[\d/.,:%()+-]+(?=[\s]|$)"  # 12/190/3, 2026-11-25
    r"|[^\s/]*/(?=\S)|\S+"  # a path may continue after a slash
)
LONGEST = 32
"""Characters of a word with digits that is kept whole; longer ones, such as checksums, may be broken."""


class Cut(str):
    """The name of a column whose cells take one line: what does not fit is left out, and ends in `...`."""

    __slots__ = ()


def print_table(columns: Iterable[str], rows: Iterable[Iterable[object]], *, header: bool = True) -> None:
    """Print rows below the names of their columns.

    Text is printed literally: it is not interpreted as markup, and control characters are escaped.
    """
    from rich.console import Console  # rich takes a while to import
    from rich.text import Text

    console = Console()
    width = console.width if console.is_terminal or "COLUMNS" in os.environ else WIDE
    columns = [type(name)(printable(name)) for name in columns]
    cells = [[printable(cell) for cell in row] for row in rows]
    if not console.is_terminal:
        sys.stdout.write("".join(f"{line}\n" for line, _ in _lines(columns, cells, width, header)))
        return
    for line, bold in _lines(columns, cells, width, header):
        text = Text(line)
        text.stylize("bold", 0, bold)
        console.print(text, no_wrap=True, overflow="ignore", crop=False, highlight=False)


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, header: bool = True
) -> list[str]:
    """The lines of a table of `width` columns; longer only if a single number is."""
    return [line for line, _ in _lines(columns, rows, width, header)]


def _lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, header: bool
) -> list[tuple[str, int]]:
    """Lines, and how many characters at the begin of each are headers."""
    names = [str(name) if header else "" for name in columns]
    widths = _widths(columns, names, rows, width)
    if widths is not None:
        heads = _join([_wrapped(name, size) for name, size in zip(names, widths, strict=True)], widths)
        found = [(line, len(line)) for line in heads] if header else []
        for row in rows:
            cells = [
                [_cut(cell, size)] if isinstance(name, Cut) else _wrapped(cell, size)
                for name, cell, size in zip(columns, row, widths, strict=True)
            ]
            found += [(line, 0) for line in _join(cells, widths)]
        return found
    return _turned(names, rows, width)


def _turned(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[tuple[str, int]]:
    """Each row as a column, as many side by side as fit."""
    left = min(max(map(_size, names), default=0), max(width // 3, TEXT))
    found: list[tuple[str, int]] = []
    at = 0
    while at < len(rows):
        count = 1
        sizes = [width - left - GAP]
        while at + count < len(rows):
            wider = [max(map(_size, _parts(row))) for row in rows[at : at + count + 1]]
            if left + sum(wider) + GAP * len(wider) > width:
                break
            count, sizes = count + 1, wider
        found += [("", 0)] if at else []
        for index, name in enumerate(names):
            texts = [rows[at + k][index] for k in range(count)]
            cells = [_wrapped(name, left), *(_wrapped(t, s) for t, s in zip(texts, sizes, strict=True))]
            found += [(line, min(left, len(line))) for line in _join(cells, [left, *sizes])]
        at += count
    return found


def _parts(row: Sequence[str]) -> list[str]:
    return [line for cell in row for line in cell.split("\n")] or [""]


def _widths(
    columns: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> list[int] | None:
    """The width of each column; None if the rows don't fit one below the other."""
    natural: list[int] = []
    least: list[int] = []
    for index, (column, name) in enumerate(zip(columns, names, strict=True)):
        lines = [line for row in rows for line in row[index].split("\n")]
        atoms = [atom for line in lines for atom in _atoms(line)]
        fixed = max((_size(atom) for atom in atoms if _whole(atom)), default=0)
        head = max(map(_size, _atoms(name)), default=0)
        natural.append(max(map(_size, [*lines, name]), default=0))
        wanted = max(map(_size, lines), default=0)
        if isinstance(column, Cut):
            least.append(max(head, min(CUT, wanted)))
        else:
            words = max(map(_size, atoms), default=0)
            least.append(max(head, fixed, min(TEXT, wanted if wanted > LONG else words)))
    room = width - GAP * (len(columns) - 1)
    if sum(natural) <= room:
        return natural
    if sum(least) > room:
        return None
    return _shared(natural, least, room)


def _shared(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths between `least` and `natural`: the widest columns give way first, all to the same width."""
    low, high = 0, max(natural)
    while low < high:
        limit = (low + high + 1) // 2
        if sum(max(small, min(big, limit)) for big, small in zip(natural, least, strict=True)) <= room:
            low = limit
        else:
            high = limit - 1
    return [max(small, min(big, low)) for big, small in zip(natural, least, strict=True)]


def _join(cells: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """The lines of one row."""
    lines: list[str] = []
    for index in range(max((len(cell) for cell in cells), default=0)):
        texts = [cell[index] if index < len(cell) else "" for cell in cells]
        padded = (text + " " * (size - _size(text)) for text, size in zip(texts, widths, strict=True))
        lines.append((" " * GAP).join(padded).rstrip())
    return lines


def _atoms(text: str) -> list[str]:
    return ATOM.findall(text)


def _whole(atom: str) -> bool:
    """Whether it is not broken."""
    if re.fullmatch(rf"{NUMBER}\D*|{NUMBER}\s±.*", atom) or not re.search(r"[^\d/.,:%()+-]", atom):
        return True
    return _size(atom) <= LONGEST and any(c.isdigit() for c in atom)


def _wrapped(text: str, width: int) -> list[str]:
    """The text in lines of this width, broken between words, and inside a word only if it is wider itself."""
    found: list[str] = []
    for line in text.split("\n"):
        if _size(line) <= width:
            found.append(line)
            continue
        current = ""
        end = 0
        for match in ATOM.finditer(line):
            between = line[end : match.start()] if current else ""
            end = match.end()
            atom = match[0]
            if current and _size(current) + _size(between) + _size(atom) <= width:
                current += between + atom
                continue
            if current:
                found.append(current)
            while _size(atom) > width and not _whole(atom):
                head = _fitting(atom, width)
                found.append(head)
                atom = atom[len(head) :]
            current = atom
        found.append(current)
    return found


def _cut(text: str, width: int) -> str:
    """The text on one line; a number that would be cut is left out."""
    line = " ".join(text.split())
    if _size(line) <= width:
        return line
    head = _fitting(line, max(width - 3, 1))
    for match in ATOM.finditer(line):
        if match.start() < len(head) < match.end() and any(c.isdigit() for c in match[0]):
            head = line[: match.start()]
    return (head.rstrip() + "...")[: max(width, 3)]


def _fitting(text: str, width: int) -> str:
    """The longest begin of the text that is not wider; at least one character."""
    size = 0
    for index, character in enumerate(text):
        size += _size(character)
        if size > width:
            return text[: max(index, 1)]
    return text


def _size(text: str) -> int:
    """Columns of a terminal that the text takes."""
    from rich.cells import cell_len

    return cell_len(text.expandtabs(1))
