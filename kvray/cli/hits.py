"""Shares of hit tokens, from the counters of replicas."""

from collections.abc import Mapping


def hit_share(counters: Mapping[str, int]) -> str:
    """Return the share of prompt tokens that were hits in the tier; empty if nothing was asked."""
    prompt, hit = counters.get("prompt_tokens", 0), counters.get("hit_tokens", 0)
    return f"{hit / prompt:.1%}" if prompt else ""
