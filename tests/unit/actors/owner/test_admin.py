"""Whoever has the token of a tier can prove it, and nobody else can."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.owner import admin
from kvray.actors.owner.admin import ask_to_be_admitted, check_proof, proof_of
from kvray.actors.tier import launch
from kvray.config import KVRayConfig, load_config
from kvray.errors import ConfigError, KVRayError

TOKEN = b"0123456789abcdef"
OTHER = b"0123456789abcdeF"


def with_token(path: Path, token: bytes, *, name: str = "test") -> KVRayConfig:
    path.write_bytes(token)
    path.chmod(0o600)
    overrides = {"security.auth_token_file": str(path), "cluster_name": name}
    return load_config(overrides=overrides, environ={})


@pytest.fixture
def config(tmp_path: Path) -> KVRayConfig:
    return with_token(tmp_path / "token", TOKEN)


def test_who_has_the_token_is_let_in_and_who_has_none_only_where_there_is_none(tmp_path, config):
    check_proof(config, proof_of(with_token(tmp_path / "copy", TOKEN + b"\n")))
    for proof in ("", proof_of(config)):
        check_proof(KVRayConfig(), proof)
    other = with_token(tmp_path / "other", OTHER)
    for proof in ("", proof_of(None), proof_of(other), TOKEN.decode(), "é" * 64):
        with pytest.raises(ConfigError, match=r"with a token only.*auth_token_file"):
            check_proof(config, proof)


def test_a_proof_is_not_the_token_and_opens_one_tier_only(tmp_path, config):
    proof = proof_of(config)
    assert TOKEN.decode() not in proof
    with pytest.raises(ConfigError, match="'other'"):
        check_proof(with_token(tmp_path / "token", TOKEN, name="other"), proof)


# -- a token that cannot be read any more ---------------------------------------------------------


BREAKS: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: path.unlink(),
    "short": lambda path: path.write_bytes(b"short"),
    "empty": lambda path: path.write_bytes(b""),
    "open to others": lambda path: path.chmod(0o644),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
}


@pytest.fixture(params=BREAKS)
def broken(tmp_path: Path, config: KVRayConfig, request: pytest.FixtureRequest) -> KVRayConfig:
    """The configuration, whose token cannot be read any more."""
    BREAKS[request.param](tmp_path / "token")
    return config


def supervise(config: KVRayConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a supervisor without Ray answer whoever asks to be admitted to the tier."""

    def ask(names: Iterable[str], method: str, timeout_s: float, proof: str) -> dict[str, Any]:
        assert method == "admit"
        try:
            check_proof(config, proof)
        except KVRayError as error:
            return dict.fromkeys(names, error)
        return dict.fromkeys(names)

    monkeypatch.setattr(admin, "list_actors", lambda prefix: ["kvray-shard-a"])
    monkeypatch.setattr(admin, "ask", ask)


def test_a_tier_that_has_lost_its_token_is_ended_by_its_user_anyhow(tmp_path, broken, monkeypatch):
    supervise(broken, monkeypatch)
    for asked in (broken, with_token(tmp_path / "other", OTHER), KVRayConfig(), None):
        ask_to_be_admitted(asked, timeout_s=1)


def test_another_user_is_not_let_in_for_a_token_that_is_lost(broken, monkeypatch):
    supervise(broken, monkeypatch)
    uid = os.geteuid()
    monkeypatch.setattr(admin.os, "geteuid", lambda: uid + 1)
    for asked in (broken, KVRayConfig(), None):
        with pytest.raises(ConfigError, match="auth_token_file"):
            ask_to_be_admitted(asked, timeout_s=1)


def test_a_token_that_is_there_is_asked_for_of_everybody_and_else_none(
    tmp_path, config, monkeypatch
):
    supervise(config, monkeypatch)
    ask_to_be_admitted(config, timeout_s=1)
    with pytest.raises(ConfigError, match="with a token only"):
        ask_to_be_admitted(KVRayConfig(), timeout_s=1)
    broken = with_token(tmp_path / "short", b"short")
    with pytest.raises(ConfigError, match=r"short of security\.auth_token_file must hold"):
        ask_to_be_admitted(broken, timeout_s=1)
    supervise(KVRayConfig(), monkeypatch)
    ask_to_be_admitted(broken, timeout_s=1)


def test_what_shows_whose_a_caller_is_is_a_private_file_with_what_he_says(tmp_path):
    with admin._witness() as witness:
        nonce, file = witness.split(" ", 1)
        path = Path(file)
        assert admin._is_own(witness)
        (tmp_path / "link").symlink_to(path)
        others = (tmp_path / "link", tmp_path / "none", tmp_path, "\0")
        wrong = (f"{'cd' * 32} {path}", f" {path}", *(f"{nonce} {other}" for other in others), "")
        assert not any(map(admin._is_own, wrong))
        path.chmod(0o644)
        assert not admin._is_own(witness)
    assert not path.exists()


def test_up_refuses_a_broken_token_before_it_starts_anything(broken, monkeypatch):
    monkeypatch.setattr(launch, "local_ray", None)
    monkeypatch.setattr(launch, "connection", None)
    with pytest.raises(ConfigError, match=r"security\.auth_token_file"):
        launch.bring_up(broken)
    with pytest.raises(ConfigError, match=r"security\.auth_token_file"):
        launch.preview(broken, launch.Rollout())
