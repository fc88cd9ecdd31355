"""The prompt-prefix digest: equal for prompts that begin alike, even where no blocks are shared.

Keys are seeded by the namespace. So a block that a replica of another namespace stored looks like
one that nobody has. The digest contains no namespace: two replicas that get the same text can tell.
"""

from collections.abc import Sequence

from kvray.identity.keys import MediaItem, Tokens, chain_keys, request_seed

PREFIX_TOKENS = 64
"""Tokens that are digested: no fewer than a block usually has, so that prompts of one digest
would share a block at least, and more than a chat template puts before every conversation."""

PREFIX_DIGEST_BYTES = 8

NOTES_MAX = 1024  # prefix digests in one report of an engine


def prefix_digest(
    tokens: Tokens,
    *,
    salt: str | int | None = None,
    lora: bytes | None = None,
    media: Sequence[MediaItem] = (),
) -> bytes:
    """Return the digest of how a prompt begins; some microseconds, however long it is.

    It is the first 8 bytes of the key that the first 64 tokens, or all of a shorter prompt, have as
    one block in no namespace. Salt, adapter and media keep digests apart as they keep keys apart.
    ConfigError: no tokens, or none of 32 bits.
    """
    head = tokens[:PREFIX_TOKENS]
    (key,) = chain_keys(
        head,
        tokens_per_block=len(head),
        seed=request_seed(b"", salt=salt, lora=lora),
        media=media,
    )
    return key[:PREFIX_DIGEST_BYTES]
