"""Tables at any width: whole numbers, readable headers, no line wider than the terminal."""

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cairn
from cairn.evaluate.evaluate import _names, _print_results
from cairn.run.extensions import syntax_tree
from cairn.run.tables import Cut, table_lines
from cairn.tools.audit.report import Epoch, Report
from cairn.tools.ckpt_output import print_audit
from cairn.watch import terminal

WIDTHS = (60, 80, 120, 200)
NUMBER = st.one_of(
    st.floats(0, 1e6).map(lambda x: f"{x:.4g}"),
    st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda x: f"{x[0]:.4g} ± {x[1]:.2g}"),
    st.integers(0, 10**12).map(lambda n: f"{n:,}"),
    st.integers(0, 10**5).map(lambda n: f"{n / 10:,.1f} MB"),
    st.tuples(*[st.integers(0, 9999)] * 3).map(lambda key: "/".join(map(str, key))),
    st.just("12 %"),
)
WORD = st.text("abcdefgäß漢字", min_size=1, max_size=12)
TEXT = st.lists(st.one_of(WORD, NUMBER), max_size=12).map(" ".join)
HEAD = st.lists(st.text("abcdefgh", min_size=1, max_size=11), min_size=1, max_size=2).map(" ".join)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    kinds = draw(st.lists(st.sampled_from(["number", "number", "text"]), min_size=1, max_size=12))
    cells = {"number": NUMBER, "text": TEXT}
    rows = draw(st.lists(st.tuples(*(cells[kind] for kind in kinds)).map(list), min_size=1, max_size=6))
    return [draw(HEAD) for _ in kinds], rows


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@given(table=tables())
@settings(max_examples=150, deadline=None)
def test_a_number_is_never_broken_and_no_line_is_too_wide(table, width: int):
    from rich.cells import cell_len

    columns, rows = table
    lines = table_lines(columns, rows, width)
    assert max(map(cell_len, lines)) <= width
    page = "\n".join(lines)
    for row in rows:
        for cell in row:
            for number in re.findall(r"\d[\d.,/e+-]*(?: ± [\d.e+-]+)?(?: (?:MB|%))?", cell):
                assert number in page
    heads = "".join(page.split())
    assert all(word in heads for name in columns for word in name.split())


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@given(cells=st.lists(TEXT, min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_column_that_is_cut_takes_one_line_and_ends_before_a_number(cells: list[str], width: int):
    columns = ["key", Cut("question"), Cut("answer")]
    rows = [["12/190/3", cell, cell] for cell in cells]
    lines = table_lines(columns, rows, width)
    assert len(lines) == 1 + len(rows)
    for cell, line in zip(cells, lines[1:], strict=True):
        for shown in re.findall(r"\S*\d\S*", line.removeprefix("12/190/3")):
            assert shown.removesuffix("...") in cell.split() or shown == "..."


def test_what_fits_has_one_line_a_row_and_headers_may_continue():
    rows = [["1", "0.5 ± 0.2"], ["2", "0.25"]]
    assert table_lines(["step", "reward"], rows, 80) == ["step  reward", "1     0.5 ± 0.2", "2     0.25"]
    assert table_lines(["dropped tries", "x"], [["0", "1"]], 12) == ["dropped    x", "tries", "0          1"]
    assert table_lines(["a", "b"], [], 80) == ["a  b"]


def test_rows_become_columns_where_nothing_else_fits():
    names = [f"column{n}" for n in range(9)]
    rows = [[str(n) for n in range(9)], [f"{n}.1234567 ± 0.5" for n in range(9)]]
    assert table_lines(names, rows, 60)[3] == "column3  3  3.1234567 ± 0.5"


RESULT = {"name": "dataset", "problems": 20, "samples": 80, "tokens": 2.1, "truncated": 0.0, "failed": 0}
CHANCES = {name: 0.1917 for name in ("reward", "pass@1", "pass@2", "pass@4")}


@pytest.mark.parametrize("width", WIDTHS)
def test_evaluations_name_the_run_and_keep_their_numbers(width: int, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    intervals = {f"{name}_ci95": 0.1234 for name in CHANCES}
    paths = ("outputs/sft/checkpoints/step_84", "outputs/rl/checkpoints/step_20")
    _print_results([{"model": path, "run_id": "x", **RESULT, **CHANCES, **intervals} for path in paths])
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= width
    assert output.count("0.1917 ± 0.12") == 8
    assert "sft/step_84" in output
    assert "rl/step_20" in output


def test_models_are_told_apart():
    assert _names(["a/rl/checkpoints/step_1", "b/rl/checkpoints/step_1", "own/model"]) == {
        "a/rl/checkpoints/step_1": "a/rl/step_1",
        "b/rl/checkpoints/step_1": "b/rl/step_1",
        "own/model": "model",
    }
    assert _names(["s3://bucket/rl/step_3", "step_4"]) == {
        "s3://bucket/rl/step_3": "rl/step_3",
        "step_4": "step_4",
    }


@pytest.mark.parametrize("width", WIDTHS)
def test_an_audit_keeps_its_headers_and_numbers(width: int, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    epoch = Epoch(0, 2000, 1234567, 1234500, 67, {"stale": 12, "lost": 3}, 10, 5, 0, 0, "arithmetic")
    print_audit(Report("outputs/rl", "rl", 1, 20, [], [epoch]))
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= width
    for text in ("environment", "waiting", "dropped", "1234567", "3 lost, 12 stale"):
        assert text in output


@pytest.mark.slow
def test_every_table_is_made_here():
    """So that all of them keep these promises; the live view of a run has grids, which are drawn anew."""
    for file in {*Path(cairn.__file__).parent.rglob("*.py")} - {Path(terminal.__file__)}:
        for node in ast.walk(syntax_tree(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            assert "rich.table" not in names, file
