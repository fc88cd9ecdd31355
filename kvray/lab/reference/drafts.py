"""Drafts of a request's next tokens, looked up in its own tokens; pure."""

from __future__ import annotations

from collections.abc import Sequence

NGRAM_SIZES = (3, 2)
"""How many last tokens are looked up: the longer match first."""


def find_drafts(tokens: Sequence[int], *, max_draft_len: int) -> list[int]:
    """Return tokens that may follow `tokens`: `max_draft_len` of them, or none without a match.

    The latest earlier occurrence of the last tokens says how they go on. Where it runs into the
    end of `tokens`, the drafts repeat themselves, as in a loop.

    Source: NGram of TensorRT-LLM, which also pads its drafts to `max_draft_len`.
    """
    distance = _distance_to_match(tokens)
    if distance is None:
        return []
    continued = list(tokens)
    for _ in range(max_draft_len):
        continued.append(continued[-distance])
    return continued[len(tokens) :]


def _distance_to_match(tokens: Sequence[int]) -> int | None:
    """Return how far back the last tokens occurred before, the last time."""
    for size in NGRAM_SIZES:
        for distance in range(1, len(tokens) - size + 1):
            start = len(tokens) - size - distance
            if tokens[start : start + size] == tokens[-size:]:
                return distance
    return None
