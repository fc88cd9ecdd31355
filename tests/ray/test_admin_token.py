"""A tier with a token is ended, cleared and changed by who has it, and looked at by everybody."""

import io
import json
from pathlib import Path

import pytest

from kvray.actors.tier import tier
from kvray.cli.page.asker import Asker
from kvray.cli.page.board import STATUS
from kvray.client import Client
from kvray.config import KVRayConfig
from kvray.errors import ConfigError
from tests.ray.command_line import open_shell
from tests.ray.conftest import TIMEOUT_S, config_with

pytestmark = pytest.mark.ray

REFUSED = r"with a token only; name a file that has it in security\.auth_token_file"


def write_token(path: Path, token: str = "of this very test") -> str:
    path.write_text(token)
    path.chmod(0o600)
    return str(path)


def test_a_tier_with_a_token_refuses_who_has_none(config: KVRayConfig, tmp_path: Path) -> None:
    named = {"security__auth_token_file": write_token(tmp_path / "token")}
    guarded = config_with(**named)
    other = config_with(security__auth_token_file=write_token(tmp_path / "other", "x" * 20))
    tier.up(guarded, timeout_s=TIMEOUT_S)
    try:
        for without in (config, other):
            with pytest.raises(ConfigError, match=REFUSED):
                tier.down(timeout_s=TIMEOUT_S, config=without)
            with pytest.raises(ConfigError, match=REFUSED), Client(without) as client:
                client.clear()
            given = without.security.auth_token_file
            changed = config_with(arena__limbo_s=7.0, security__auth_token_file=given)
            with pytest.raises(ConfigError, match=REFUSED):
                tier.up(changed, timeout_s=TIMEOUT_S)
            with Client(without) as client:
                assert client.status()["shards"][0]["state"] == "serving"
        with Client(guarded) as client:
            assert client.clear() == 0
        tier.up(config_with(arena__limbo_s=7.0, **named), timeout_s=TIMEOUT_S)
    finally:
        assert tier.down(timeout_s=TIMEOUT_S, config=guarded)


def test_the_page_of_a_tier_with_a_token_has_nothing_for_who_has_none(
    config: KVRayConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_token(tmp_path / "token")
    guarded = config_with(security__auth_token_file=path)
    monkeypatch.setenv("KVRAY_CLUSTER_NAME", config.cluster_name)
    output = io.StringIO()
    asker = Asker(None, None, output)
    tier.up(guarded, timeout_s=TIMEOUT_S)
    try:
        assert not asker._attempt(STATUS, asker._status)
        assert "security.auth_token_file" in json.loads(output.getvalue())["trouble"]
        monkeypatch.setenv("KVRAY_SECURITY__AUTH_TOKEN_FILE", path)
        assert asker._attempt(STATUS, asker._status)
    finally:
        assert tier.down(timeout_s=TIMEOUT_S, config=guarded)


@pytest.mark.long
def test_who_may_not_end_a_tier_does_not_end_its_ray_either(tmp_path: Path) -> None:
    variable = "KVRAY_SECURITY__AUTH_TOKEN_FILE"
    with open_shell("token") as shell:
        path = shell.directory / "token.yaml"  # of those that no command has left
        token = {variable: write_token(path)}
        assert shell.run("up", **token).returncode == 0
        refused = shell.run("down")
        assert refused.returncode == 2
        assert refused.stderr.count("\n") == 1
        assert "security.auth_token_file" in refused.stderr
        assert shell.run("status").returncode == 0
        assert shell.run("down", **token).returncode == 0
        assert shell.leftovers() == []


@pytest.mark.long
def test_a_broken_token_is_refused_at_up_and_never_keeps_its_user_from_down(tmp_path: Path) -> None:
    variable = "KVRAY_SECURITY__AUTH_TOKEN_FILE"
    with open_shell("broken") as shell:
        path = shell.directory / "token.yaml"
        token = {variable: write_token(path)}
        path.chmod(0o644)
        refused = shell.run("up", **token)
        assert (refused.returncode, "has mode 0644" in refused.stderr) == (2, True)
        assert shell.leftovers() == []
        path.chmod(0o600)
        assert shell.run("up", **token).returncode == 0
        path.chmod(0o644)
        assert shell.run("down").returncode == 0
        assert shell.leftovers() == []
