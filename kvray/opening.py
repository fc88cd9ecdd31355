"""The opening of a prompt: a digest of how it begins, equal in replicas that share no blocks.

Keys are seeded by the namespace, so that a block which another replica stored in another namespace
looks like one that nobody has. An opening knows no namespace: two replicas that are asked for the
same text see that they were, whatever their layouts.
"""

from collections.abc import Sequence

from kvray.keys import MediaItem, Tokens, chain_keys, request_seed

OPENING_TOKENS = 64
"""Tokens that are digested: no fewer than a block usually has, so that prompts of one opening
would share a block at least, and more than a chat template puts before every conversation."""

OPENING_BYTES = 8

NOTES_MAX = 1024
"""Notes on openings in one report of an engine."""


def opening_digest(
    tokens: Tokens,
    *,
    salt: str | int | None = None,
    lora: bytes | None = None,
    media: Sequence[MediaItem] = (),
) -> bytes:
    """Return the digest of how a prompt begins; some microseconds, however long it is.

    What keeps requests of one namespace from sharing keeps their openings apart too.

    Args:
        tokens: the prompt's token ids, shape [num_tokens], at least one.
        salt: as in `request_seed`.
        lora: as in `request_seed`.
        media: as in `chain_keys`; items behind the opening do not count.

    Returns:
        The first 8 bytes of the key that the first 64 tokens, or all of a shorter prompt, have as
        one block in no namespace.

    Raises:
        ConfigError: no tokens, or none of 32 bits.
    """
    head = tokens[:OPENING_TOKENS]
    (key,) = chain_keys(
        head,
        tokens_per_block=len(head),
        seed=request_seed(b"", salt=salt, lora=lora),
        media=media,
    )
    return key[:OPENING_BYTES]
