"""Tenants get salts that nobody else can have, and requests without a tenant get none."""

import hashlib
import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.errors import ConfigError
from kvray.identity.block import frame
from kvray.identity.tenant import TenantSalts, tenant_id

SECRET = b"0123456789abcdef"
SALTS = TenantSalts(SECRET)


def derived(salt: str | int | None, salts: TenantSalts = SALTS) -> str:
    found = salts.derive(salt)
    assert found is not None
    return found.salt


def test_the_salt_is_the_hmac_of_the_secret_over_tenant_and_salt() -> None:
    message = frame(b"kvray.tenant", b"acme", b"v1/x")
    assert derived("acme/v1/x") == hmac.new(SECRET, message, hashlib.sha256).hexdigest()
    # Keys outlive processes on disk: this must never change.
    assert derived("acme/v1") == "f69b95cac74d6665fde5f6032b3c2e512158a191dc03d1152106b1a1cd435a57"
    assert derived(7) == "7d882f60fdbf8ae57101277e882c5ca0f2f76c281c367b1d7e9f93774caadd4e"


def test_tenants_salts_and_secrets_are_kept_apart() -> None:
    told = ["acme", "acme/1", "acme/2", "acm/e1", "acme/1/", "other/1", 1, 2, 17]
    found = [derived(one) for one in told]
    found += [derived(one, TenantSalts(b"another secret of 26 bytes")) for one in told]
    assert len(set(found)) == len(found)


def test_a_tenant_needs_no_salt_of_its_own() -> None:
    assert derived("acme") == derived("acme/")


@pytest.mark.parametrize(
    "salt", [None, "", "/", "/acme", " acme/1", "a b/1", "é/1", "a" * 129, "\0"]
)
def test_a_request_without_a_tenant_gets_no_salt(salt: str | None) -> None:
    assert SALTS.derive(salt) is None


def test_a_number_stands_for_tenant_and_salt() -> None:
    one, two = SALTS.derive(1), SALTS.derive(2)
    assert one is not None
    assert two is not None
    assert one.salt != two.salt
    assert one.tenant_id != two.tenant_id
    assert derived(1) != derived("1")


def test_a_tenant_is_known_to_an_arena_whatever_its_salt() -> None:
    found = [SALTS.derive(salt) for salt in ("acme", "acme/1", "acme/2")]
    assert {one.tenant_id for one in found if one is not None} == {tenant_id("acme")}
    assert tenant_id("acme") != tenant_id("other")


@given(st.text(), st.text())
def test_what_a_tenant_chooses_never_makes_it_another(mine: str, theirs: str) -> None:
    found = [SALTS.derive(f"mine/{mine}"), SALTS.derive(f"theirs/{theirs}")]
    assert len({one.salt for one in found if one is not None}) == 2


def test_equal_secrets_are_told_by_their_check_which_is_no_salt() -> None:
    assert SALTS.check == TenantSalts(SECRET).check != TenantSalts(SECRET + b".").check
    assert len(SALTS.check) == 16


def test_without_a_secret_there_are_no_salts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tenant_secret_file cannot be read"):
        TenantSalts.read(tmp_path / "none")
