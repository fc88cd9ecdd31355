"""Tenants get salts that nobody else can have; secrets are in files that nobody else can read."""

import hashlib
import hmac
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.errors import ConfigError
from kvray.identity.block import frame
from kvray.identity.tenant import TenantSalts, read_secret, tenant_id

SECRET = b"0123456789abcdef"
SALTS = TenantSalts(SECRET)


def derived(salt: str | int | None, salts: TenantSalts = SALTS) -> str:
    found = salts.derive(salt)
    assert found is not None
    return found.salt


def test_the_salt_is_the_hmac_of_the_secret_over_tenant_and_salt():
    message = frame(b"kvray.tenant", b"acme", b"v1/x")
    assert derived("acme/v1/x") == hmac.new(SECRET, message, hashlib.sha256).hexdigest()
    assert derived("acme/v1/x") not in repr(SALTS.derive("acme/v1/x"))
    # Keys outlive processes on disk: this must never change.
    assert derived("acme/v1") == "f69b95cac74d6665fde5f6032b3c2e512158a191dc03d1152106b1a1cd435a57"
    assert derived(7) == "7d882f60fdbf8ae57101277e882c5ca0f2f76c281c367b1d7e9f93774caadd4e"


def test_tenants_salts_and_secrets_are_kept_apart():
    other = TenantSalts(b"another secret of 26 bytes")
    told = ["acme", "acme/1", "acme/2", "acm/e1", "acme/1/", "other/1", 1, 2, 17, "1"]
    found = [derived(one, salts) for one in told for salts in (SALTS, other)]
    assert len(set(found)) == len(found)
    assert derived("acme") == derived("acme/"), "a tenant needs no salt of its own"
    assert SALTS.check == TenantSalts(SECRET).check != other.check, "which is told to others"
    assert len(SALTS.check) == 16


@pytest.mark.parametrize(
    "salt", [None, "", "/", "/acme", " acme/1", "a b/1", "é/1", "a" * 129, "\0"]
)
def test_a_request_without_a_tenant_gets_no_salt(salt):
    assert SALTS.derive(salt) is None


def test_a_tenant_is_known_to_an_arena_whatever_its_salt():
    found = [SALTS.derive(salt) for salt in ("acme", "acme/1", "acme/2", 1, 2)]
    ids = [one.tenant_id for one in found if one is not None]
    assert ids[:3] == [tenant_id("acme")] * 3
    assert len({*ids, tenant_id("other")}) == 4, "a number stands for tenant and salt"


@given(st.text(), st.text())
def test_what_a_tenant_chooses_never_makes_it_another(mine, theirs):
    found = [SALTS.derive(f"mine/{mine}"), SALTS.derive(f"theirs/{theirs}")]
    assert len({one.salt for one in found if one is not None}) == 2


def write(path: Path, text: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_a_secret_is_what_stands_between_white_space_also_behind_a_link(tmp_path, mode):
    path = write(tmp_path / "secret", b"\n 0123456789abcdef\n", mode)
    (tmp_path / "link").symlink_to("secret")  # as Kubernetes mounts them
    for one in (path, tmp_path / "link"):
        assert read_secret(one, setting="x.y") == b"0123456789abcdef"


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o620, 0o610, 0o644, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path, mode):
    path = write(tmp_path / "secret", b"0123456789abcdef", mode)
    with pytest.raises(ConfigError, match=rf"x\.y has mode {mode:04o}.*chmod 600"):
        read_secret(path, setting="x.y")


@pytest.mark.parametrize("text", [b"", b"  \n", b"too short", bytes(5000)])
def test_a_secret_that_is_none_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="must hold 16 to 4096 bytes"):
        read_secret(write(tmp_path / "secret", text), setting="x.y")


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    pipe, directory = tmp_path / "pipe", tmp_path / "directory"
    os.mkfifo(pipe, 0o600)
    directory.mkdir(0o700)
    plain = r"x\.y is no plain file; name the file"
    for path in (pipe, directory, tmp_path / "none", tmp_path, Path("a\0b")):
        with pytest.raises(ConfigError, match=plain if path in (pipe, directory) else r"x\.y"):
            read_secret(path, setting="x.y")
