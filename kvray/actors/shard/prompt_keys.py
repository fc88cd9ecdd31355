"""The keys of a prompt that no engine has seen yet, equal to those that its engine will give it."""

import hashlib
from collections.abc import Sequence

import numpy as np

from kvray.actors.staging.replicas import Reader
from kvray.config import cache_dir
from kvray.errors import ConfigError, ShardUnavailable
from kvray.identity.block import UNNAMED, BlockKey, frame
from kvray.identity.fingerprint import fingerprint_model
from kvray.identity.keys import MediaItem, chain_keys, request_seed
from kvray.identity.tenant import TenantSalts


def prompt_keys(
    reader: Reader,
    tokens: bytes,
    *,
    salt: str | int | None = None,
    lora: str | None = None,
    media: Sequence[tuple[int, bytes]] = (),
    tenants: TenantSalts | None = None,
) -> list[BlockKey]:
    """Return the keys of a prompt's full blocks.

    Its engine computes the last token itself, so it has no use for a block that ends with it; but a
    prompt may be the beginning of others.

    Args:
        reader: a rank of the replica that the prompt is for.
        tokens: the prompt's token ids, little-endian int32 end to end.
        salt: the request's cache salt.
        lora: path of the request's adapter, as the engine is given it and as this node has it.
        media: position and digest of each `MediaItem`.
        tenants: derives salts with the secret of this node, if it has one.
    """
    check_named(reader)
    if len(tokens) % 4:
        raise ConfigError(f"{len(tokens)} bytes are no whole number of token ids of 4 bytes.")
    salt = salt if reader.tenants is None else _of_tenant(reader.tenants, salt, tenants)
    adapter = None if lora is None else _adapter(reader, lora)
    return chain_keys(
        np.frombuffer(tokens, dtype="<i4"),
        tokens_per_block=reader.tokens_per_block,
        seed=request_seed(reader.namespace.digest(), salt=salt, lora=adapter),
        media=[MediaItem(position=position, digest=digest) for position, digest in media],
    )


def check_named(reader: Reader) -> None:
    """Raise ShardUnavailable while a replica's prompts have no keys."""
    if reader.namespace.model == UNNAMED:
        raise ShardUnavailable(
            "The replica uses no tier until its checkpoint is told from others, of which"
            " `kvray status` says how far it is, and its weights have a version. Try again then, or"
            " name them: by connector.model_key, by Client.set_weights_version."
        )


def _of_tenant(check: str, salt: str | int | None, tenants: TenantSalts | None) -> str:
    """Return the salt that the engine derives from a request's, with the secret behind `check`."""
    if tenants is None or tenants.check != check:
        raise ConfigError(
            "The replica keeps tenants apart with another secret than this shard has; give both"
            " the same file in security.tenant_secret_file."
        )
    derived = tenants.derive(salt)
    if derived is None:
        raise ConfigError(
            "The prompt names no tenant, so its blocks are nowhere; give the salt of its request,"
            " <tenant>/<salt>."
        )
    return derived.salt


def _adapter(reader: Reader, path: str) -> bytes:
    """Return what tells an adapter from others, as the engine's connector does."""
    if reader.adapters is None:
        raise ConfigError(
            "The replica has not said how it reads LoRA adapters; update its kvray, or prefetch"
            " prompts without an adapter."
        )
    found = fingerprint_model(path, cache_dir=cache_dir() / "fingerprints")
    return hashlib.sha256(frame(found.encode(), reader.adapters.encode())).digest()
