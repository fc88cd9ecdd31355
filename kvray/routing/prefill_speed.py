"""How fast an engine computes prompts, from what its answers tell; pure."""

PREFILL_STAT = "kvray_prefill_tokens_per_s"
SLOWDOWN_STAT = "kvray_decode_slowdown"
"""Under these names the `record_routing_stats` of a deployment tells its routers."""

_SLOWDOWN_MAX = 2.0
_TOKENS_MIN = 128
"""A first token after fewer tells more of what a pass costs than of what a token costs."""
_KEPT = 0.95
"""What each answer leaves of the weight of those before."""
_RIDGE = 1.0
"""Variance of the number of answers at which half of what they seem to cost is believed: a few
answers that were slow by chance must not make busy replicas look far slower."""


class PrefillSpeed:
    """Seconds per token, a line over the answers under way, by ridge regression; newer count more.

    Prompts that one pass computes have their first tokens at once. So only sums tell how long a
    token takes, and no prompt alone.
    """

    def __init__(self) -> None:
        # Of the tokens: their number, answers under way beside them, these squared, seconds, and
        # answers times seconds.
        self._n = self._x = self._xx = self._y = self._xy = 0.0

    def note(self, num_computed: int, seconds: float, num_answering: int) -> None:
        """Note a prompt.

        Args:
            num_computed: its tokens that were computed.
            seconds: from when it came, or from the first token of the prompt before it if that was
                later, to its own first token.
            num_answering: answers that were under way.
        """
        if num_computed < _TOKENS_MIN or seconds < 0:
            return
        n, x = num_computed, num_answering
        self._n = _KEPT * self._n + n
        self._x = _KEPT * self._x + n * x
        self._xx = _KEPT * self._xx + n * x * x
        self._y = _KEPT * self._y + seconds
        self._xy = _KEPT * self._xy + x * seconds

    @property
    def tokens_per_s(self) -> float:
        """Without anything beside; 0: not known yet."""
        token_s, _ = self._line()
        return 1 / token_s if token_s > 0 else 0.0

    @property
    def decode_slowdown(self) -> float:
        """By what part of itself a prefill takes longer for each answer under way."""
        token_s, answer_s = self._line()
        return answer_s / token_s if token_s > 0 else 0.0

    def _line(self) -> tuple[float, float]:
        """Return a token's seconds without answers, and those that each answer adds."""
        if not self._n:
            return 0.0, 0.0
        spread = max(0.0, self._n * self._xx - self._x * self._x) + _RIDGE * self._n * self._n
        answer_s = max(0.0, (self._n * self._xy - self._x * self._y) / spread)
        token_s = (self._y - answer_s * self._x) / self._n
        if answer_s > _SLOWDOWN_MAX * token_s:
            token_s = self._y / (self._n + _SLOWDOWN_MAX * self._x)
            answer_s = _SLOWDOWN_MAX * token_s
        return token_s, answer_s
