from hypothesis import given
from hypothesis import strategies as st

from kvray.node.incompatible import explain


def test_one_field_that_differs_takes_one_line() -> None:
    text = explain(12288, "b", {"tp_layout": ("tp2", "tp4"), "part_bytes": (65536, 32768)})
    first, *rows, last = text.splitlines()
    assert first.startswith("kvray: 12,288 tokens ")
    assert "'b'" in first
    assert rows == [
        "  tp_layout: here tp2, there tp4",
        "  part_bytes: here 65536, there 32768",
    ]
    assert "same model and engine arguments" in last


def test_long_values_are_shown_where_they_begin_to_differ() -> None:
    same = "x" * 500
    text = explain(1, "b", {"overrides": (same + "rope=1", same + "rope=2" + same)})
    (row,) = text.splitlines()[1:-1]
    assert "here ...xxxrope=1, " in row
    assert "there ...xxxrope=2xxx" in row
    assert len(row) < 160


@given(st.text(max_size=200), st.text(max_size=200))
def test_values_that_differ_never_look_equal(mine: str, theirs: str) -> None:
    if mine != theirs:
        _, row, _ = explain(1, "b", {"field": (mine, theirs)}).split("\n")
        here, there = row.removeprefix("  field: here ").split(", there ", 1)
        assert here.strip() != there
