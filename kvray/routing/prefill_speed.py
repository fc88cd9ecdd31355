"""How fast an engine computes prompts, from what its answers tell; pure."""

PREFILL_STAT = "kvray_prefill_tokens_per_s"
SLOWDOWN_STAT = "kvray_decode_slowdown"
"""Under these names the `record_routing_stats` of a deployment tells its routers."""

_SLOWDOWN_MAX = 2.0
_TOKENS_MIN = 128
"""A first token after fewer tells more of what a pass costs than of what a token costs."""
_WEIGHT = 0.3


class PrefillSpeed:
    """Tokens per second, and how much answers under way slow it; the newest count most."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """Without anything beside; 0: not known yet."""
        self.decode_slowdown = 0.0
        """By what part of itself a prefill takes longer for each answer under way."""

    def note(self, num_computed: int, first_token_s: float, num_answering: int = 0) -> None:
        """Note a request that did not wait for other prompts.

        Args:
            num_computed: tokens of its prompt that were computed.
            first_token_s: time to its first token.
            num_answering: answers that were under way.
        """
        if num_computed < _TOKENS_MIN or first_token_s <= 0:
            return
        speed = num_computed / first_token_s
        if not num_answering:
            self.tokens_per_s = _blend(self.tokens_per_s or speed, speed)
        elif self.tokens_per_s:
            slowdown = max(0.0, self.tokens_per_s / speed - 1) / num_answering
            self.decode_slowdown = _blend(self.decode_slowdown, min(slowdown, _SLOWDOWN_MAX))


def _blend(before: float, measured: float) -> float:
    return before + _WEIGHT * (measured - before)
