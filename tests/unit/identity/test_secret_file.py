"""Secrets are read from files that nobody else can read, or nothing goes on."""

import os
from pathlib import Path

import pytest

from kvray.errors import ConfigError
from kvray.identity.tenant import read_secret


def write(path: Path, text: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_a_secret_is_what_stands_between_white_space(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "secret", b"\n 0123456789abcdef\n", mode)
    assert read_secret(path, setting="x.y") == b"0123456789abcdef"


def test_a_link_to_a_secret_is_followed_as_kubernetes_mounts_them(tmp_path: Path) -> None:
    write(tmp_path / "data", b"0123456789abcdef")
    (tmp_path / "link").symlink_to("data")
    assert read_secret(tmp_path / "link", setting="x.y") == b"0123456789abcdef"


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o620, 0o610, 0o644, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "secret", b"0123456789abcdef", mode)
    with pytest.raises(ConfigError, match=rf"x\.y has mode {mode:04o}.*chmod 600"):
        read_secret(path, setting="x.y")


@pytest.mark.parametrize("text", [b"", b"  \n", b"too short", bytes(5000)])
def test_a_secret_that_is_none_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ConfigError, match="must hold 16 to 4096 bytes"):
        read_secret(write(tmp_path / "secret", text), setting="x.y")


@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_what_is_no_plain_file_is_told_so(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    os.mkfifo(path, 0o600) if kind == "pipe" else path.mkdir(0o700)
    with pytest.raises(ConfigError, match=r"x\.y is no plain file; name the file"):
        read_secret(path, setting="x.y")


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path / "none", tmp_path, Path("a\0b")):
        with pytest.raises(ConfigError, match=r"x\.y"):
            read_secret(path, setting="x.y")
