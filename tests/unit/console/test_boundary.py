"""Where a command meets its user."""

import pytest

from kvray.console.output import stdout_kept


def test_what_others_print_meanwhile_is_no_part_of_the_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with stdout_kept():
        print("(raylet) The node has been marked dead.")
    print("{}")
    said = capsys.readouterr()
    assert said.out == "{}\n"
    assert "marked dead" in said.err
