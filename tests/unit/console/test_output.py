"""What others say is printed as it is: no markup, no control characters, no line cut."""

import json
from pathlib import Path
from typing import Any

import pytest

import kvray
from kvray.cli.asking import show_answer
from kvray.console.output import empty_table, printer, stdout_kept, visible

NAME = "[/bold][red]x[link=http://h]:smile:"


def test_a_console_prints_markup_as_it_is(capsys):
    console = printer()
    console.print(NAME)
    table = empty_table("a", NAME, title=NAME)
    table.add_row(NAME, NAME)
    console.print(table)
    printer(is_error=True).print(NAME)
    said, error = capsys.readouterr()
    assert said.count(NAME) == 5
    assert error == f"{NAME}\n"


def test_what_is_no_terminal_gets_whole_lines(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    long = "word " * 200 + "end"
    table = empty_table("a", numbers=("b",), folds=True)
    table.add_row(long, long)
    for soft_wrap in (False, True):
        printer(soft_wrap=soft_wrap).print(table)
        printer(soft_wrap=soft_wrap).print(long)
    assert sum(line.count("end") for line in capsys.readouterr().out.splitlines()) == 6
    printer().print(table)
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "end" in line)
    assert row.count(long) == 2


@pytest.mark.parametrize("bad", ["\x1b[2J", "\r", "\n", "\x9b", "\u202e", "\ud800", "\x00"])
def test_characters_that_control_a_terminal_are_written_out(bad, capsys):
    found = {f"k{bad}": [f"v{bad}w", {"n": 1.5, "none": None}]}

    def show(told: Any) -> list[str]:
        return [f"{one} {told[one][0]}" for one in told]

    show_answer(found, show, as_json=False)
    said = capsys.readouterr().out
    assert bad not in said[:-1]
    assert f"v{ascii(bad[0])[1:-1]}" in said
    show_answer(found, show, as_json=True)
    assert json.loads(capsys.readouterr().out) == found
    assert visible("plain Ü 東京") == "plain Ü 東京"


def test_every_command_prints_through_this_console():
    """Another one would know markup, and cut lines of a file at 80 columns."""
    root = Path(kvray.__file__).parent
    makers = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "Console(" in path.read_text() or "from_markup" in path.read_text()
    }
    assert makers == {"console/output.py"}


def test_what_others_print_meanwhile_is_no_part_of_the_answer(capsys):
    with stdout_kept():
        print("(raylet) The node has been marked dead.")
    print("{}")
    said = capsys.readouterr()
    assert said.out == "{}\n"
    assert "marked dead" in said.err
