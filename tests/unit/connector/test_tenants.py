"""Tenants that share an engine and a tier neither read nor probe each other's prefixes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.shard import Shard
from kvray.config import load_config
from kvray.connector import KvRayScheduler, KvRayWorker
from kvray.errors import ConfigError
from kvray.identity.keys import pack_tokens
from kvray.identity.tenant import tenant_id
from kvray.store.arena.quotas import name_of
from tests.kit.connector import HIT, PROMPT, Pair, Request, args_for
from tests.kit.tier import Tier
from tests.unit.actors.small_shard import failed_with


@pytest.fixture(autouse=True)
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"of this very test")
    path.chmod(0o600)
    monkeypatch.setenv("KVRAY_SECURITY__TENANT_SECRET_FILE", str(path))
    return path


@pytest.fixture
def shard(environment: dict[str, str], secret: Path) -> Iterator[Shard]:
    tier = Tier()
    yield tier.shard
    tier.stop()


def ask(pair: Pair, request_id: int, salt: str | int | None) -> int:
    """Serve a request with a salt; return how many tokens were loaded for it."""
    request = Request(request_id, PROMPT)
    if salt is not None:
        setattr(request, "cache_salt_id" if isinstance(salt, int) else "cache_salt", salt)
    pair.wait_for_arena()
    matched = pair.serve(request)
    pair.flush()
    return matched


def test_a_tenant_finds_what_it_stored_and_nobody_else_does(pair):
    assert ask(pair, 1, "acme/1") == 0
    assert ask(pair, 2, "acme/1") == HIT
    for request_id, salt in enumerate(["acme/2", "acme", "other/1", "other", 1], start=3):
        assert ask(pair, request_id, salt) == 0, salt
        assert ask(pair, 100 + request_id, salt) == HIT, salt


def test_what_a_tenant_stored_is_not_found_by_a_guess_of_its_salt(make_pair, monkeypatch):
    pair = make_pair()
    assert ask(pair, 1, "acme/1") == 0
    monkeypatch.delenv("KVRAY_SECURITY__TENANT_SECRET_FILE")
    without = make_pair(args_for(kwargs="another engine"))
    assert without.scheduler._shared.tenants is None
    assert ask(without, 2, "acme/1") == 0


def test_requests_without_a_tenant_share_nothing_and_leave_nothing(pair, caplog):
    for request_id, salt in enumerate([None, None, "/x", "", "no tenant's name"]):
        assert ask(pair, request_id, salt) == 0
    assert (pair.totals["tenantless_requests"], pair.totals["bypassed_requests"]) == (5, 5)
    assert pair.totals["stored_blocks"] == 0
    assert caplog.text.count("a request goes without the tier: it names no tenant") == 1


@pytest.mark.parametrize("half", [KvRayWorker, KvRayScheduler])
def test_an_engine_whose_secret_is_missing_does_not_start(environment, secret, half):
    secret.unlink()
    with pytest.raises(ConfigError, match="tenant_secret_file cannot be read"):
        half(args_for())


def test_a_prompt_is_prefetched_under_the_keys_of_its_tenant(shard, pair):
    ask(pair, 1, "acme/1")
    assert prefetch(shard, pair, "acme/1") == 10
    assert prefetch(shard, pair, "other/1") == 0
    with pytest.raises(ConfigError, match="names no tenant"):
        prefetch(shard, pair, None)


def test_a_shard_with_another_secret_than_the_engine_says_so(shard, make_pair, secret):
    secret.write_bytes(b"not the one of the shard")
    with pytest.raises(ConfigError, match="with another secret"):
        prefetch(shard, make_pair(), "acme/1")


def test_a_shard_without_its_secret_fails_with_the_sentence(environment, secret):
    secret.unlink()
    shard = Shard("test", ShardSettings.of(load_config()))
    shard.start()
    assert "tenant_secret_file cannot be read" in failed_with(shard)
    shard.stop(retire=True, timeout_s=10)


@pytest.fixture
def quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kvray.yaml"
    path.write_text("security: {tenant_quota: 512, tenant_quotas: {rich: 8KiB}}")
    monkeypatch.setenv("KVRAY_CONFIG", str(path))


def test_a_tenant_is_kept_within_its_quota_and_takes_nobody_elses_blocks(quotas, shard, pair):
    tenants = ("poor", "rich", "other")
    for request_id, tenant in enumerate(tenants):
        ask(pair, request_id, f"{tenant}/1")
    owner = shard._require_serving().owner
    shard._loop.call(lambda: owner.evict_ahead(0.0), 10)  # beside nothing else of the shard's
    blocks = {one["namespace"]: one["blocks"] for one in owner.arena.stats()["namespaces"]}
    assert [blocks[name_of(tenant_id(tenant))] for tenant in tenants] == [4, 10, 4]


def prefetch(shard: Shard, pair: Pair, salt: str | None) -> int:
    tokens = pack_tokens(PROMPT).tobytes()
    answer = shard.requests.prefetch(pair.engine.replica, tokens, salt=salt)
    return int(answer["num_blocks"])
