"""How fast an engine computes prompts, from what its answers tell; pure."""

PREFILL_STAT = "kvray_prefill_tokens_per_s"
"""Under this name the `record_routing_stats` of a deployment tells its routers."""

_TOKENS_MIN = 128
"""A first token after fewer tells more of what a pass costs than of what a token costs."""
_WEIGHT = 0.3


class PrefillSpeed:
    """Tokens per second, the newest answer counting most."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """0: not known yet."""

    def note(self, num_computed: int, first_token_s: float) -> None:
        """Note a request that was alone: tokens that were computed, and time to its first one."""
        if num_computed < _TOKENS_MIN or first_token_s <= 0:
            return
        speed = num_computed / first_token_s
        before = self.tokens_per_s or speed
        self.tokens_per_s = before + _WEIGHT * (speed - before)
