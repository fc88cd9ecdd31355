import io
from pathlib import Path

import pytest

from kvray.cli.asking import read_tokens
from kvray.errors import ConfigError


def test_tokens_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompt.json").write_text("[1, 15043, 29871]")

    assert read_tokens(tmp_path / "prompt.json") == [1, 15043, 29871]


def test_tokens_are_read_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("[7]"))

    assert read_tokens(Path("-")) == [7]


@pytest.mark.parametrize("text", ["", "Hello", '["1"]', "[true]", '{"tokens": [1]}'])
def test_what_are_no_tokens_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.json").write_text(text)

    with pytest.raises(ConfigError, match=r"prompt\.json (must have token ids|cannot be read)"):
        read_tokens(tmp_path / "prompt.json")


def test_numbers_may_be_apart_by_white_space(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("1 15043\n29871\n")

    assert read_tokens(tmp_path / "prompt.txt") == [1, 15043, 29871]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        read_tokens(tmp_path / "nowhere.json")
