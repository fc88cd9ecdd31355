"""What `kvray size` and `kvray status` say about memory."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from kvray.actors.tier.sizing import combined
from kvray.cli.app import app
from kvray.cli.size import _print, make_figure
from kvray.cli.text.sizing import sizing_line
from tests.unit.actors.tier.test_sizing import node


def said(capsys: pytest.CaptureFixture[str], found: dict[str, Any], *more: int) -> str:
    _print(found, list(more))
    return capsys.readouterr().out


def test_it_says_what_more_memory_would_bring_and_what_the_disk_gives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, combined([node("a", disk=[0.2, 0.1, 0.04, 0.0])]))
    assert "3f0a91c2 (key:m)" in text
    assert (
        "At today's 40B of host memory 34 % of prompt tokens hit: 10 % are in the engines' own"
        in text
    )
    assert "With +40B of host memory 40 % of prompt tokens would hit instead of 34 %" in text
    assert "give or take 6 points" in text
    assert "The disk gives 4 points." in text
    assert "Below 10B it is not worth running." in text
    assert "too fast to be looked at: 1." in text


def test_a_size_beyond_the_curve_gets_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert "The curve ends at 80B" in said(capsys, combined([node("a")]), 1000)


def test_where_all_fits_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    one = node("a")
    one["traffic"]["distinct_bytes"] = 30
    assert "fit into 30B" in said(capsys, combined([one]))
    assert "fit into" not in said(capsys, combined([node("a")]))


def test_with_too_little_traffic_it_says_so_instead_of_a_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "Too little traffic" in said(capsys, combined([]))
    assert "Too little traffic" in sizing_line(combined([]))


def test_status_has_one_sentence() -> None:
    line = sizing_line(combined([node("a")]))
    assert line.startswith("With +40B of host memory 40 % of prompt tokens would hit")
    assert "`kvray size`" in line


def test_the_picture_has_a_curve_for_each_namespace() -> None:
    figure = make_figure(combined([node("a")]))
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines[:2]] == [
        "and disk",
        "engines' pools and host memory",
    ]
    assert make_figure(combined([])).axes == []


def test_what_is_no_size_is_refused_before_anything_is_asked() -> None:
    done = CliRunner().invoke(app, ["size", "--add", "64 sheep"])
    assert done.exit_code == 2
    assert "--add" in done.stderr


def test_json_has_everything() -> None:
    found = combined([node("a")])
    assert json.loads(json.dumps(found)) == found
