"""Whoever has the token of a tier can prove it, and nobody else can."""

from pathlib import Path

import pytest

from kvray.actors.admin import check_proof, proof_of
from kvray.config import KVRayConfig, load_config
from kvray.errors import ConfigError


def with_token(path: Path, token: bytes, *, name: str = "test") -> KVRayConfig:
    path.write_bytes(token)
    path.chmod(0o600)
    overrides = {"security.auth_token_file": str(path), "cluster_name": name}
    return load_config(overrides=overrides, environ={})


def test_who_has_the_token_is_let_in(tmp_path: Path) -> None:
    config = with_token(tmp_path / "token", b"0123456789abcdef\n")
    same = with_token(tmp_path / "copy", b"0123456789abcdef")
    check_proof(config, proof_of(same))


def test_who_has_none_or_another_one_is_not(tmp_path: Path) -> None:
    config = with_token(tmp_path / "token", b"0123456789abcdef")
    other = with_token(tmp_path / "other", b"0123456789abcdeF")
    for proof in ("", proof_of(None), proof_of(other), "0123456789abcdef", "é" * 64):
        with pytest.raises(ConfigError, match=r"with a token only.*auth_token_file"):
            check_proof(config, proof)


def test_a_proof_is_not_the_token_and_opens_one_tier_only(tmp_path: Path) -> None:
    config = with_token(tmp_path / "token", b"0123456789abcdef")
    proof = proof_of(config)
    assert "0123456789abcdef" not in proof
    with pytest.raises(ConfigError, match="'other'"):
        check_proof(with_token(tmp_path / "token", b"0123456789abcdef", name="other"), proof)


def test_a_tier_without_a_token_lets_everybody_in(tmp_path: Path) -> None:
    config = with_token(tmp_path / "token", b"0123456789abcdef")
    check_proof(KVRayConfig(), "")
    check_proof(KVRayConfig(), proof_of(config))


def test_a_tier_that_cannot_read_its_token_lets_nobody_in(tmp_path: Path) -> None:
    config = with_token(tmp_path / "token", b"0123456789abcdef")
    proof = proof_of(config)
    (tmp_path / "token").unlink()
    with pytest.raises(ConfigError, match="auth_token_file cannot be read"):
        check_proof(config, proof)
