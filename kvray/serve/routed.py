"""What an ingress tells the router of one request, and hears of it.

It is in a module of its own: Ray Serve pickles that of the router by value, so a class of it is
another one in each process's router than in the ingress.
"""

import asyncio
import time
from collections.abc import Iterable
from functools import partial

from kvray.routing import Choice, Cost, Decisions


class Routed:
    """One request; pass a new one as `kvray_routed` to `choose_replica`, and to nothing else.

    Without it the router takes the first token to come when it predicted it. With another router
    than kvray's it does nothing. The router may be on another event loop. Replicas go by their
    names in kvray.
    """

    def __init__(self, *, is_told: bool = True) -> None:
        """`is_told`: its first token will be told; else it is taken to come when it is due."""
        self.is_told = is_told
        self.is_sent = self._is_over = False
        self.here: frozenset[str] = frozenset()
        """Replicas to whose nodes nothing would have to be brought: a prefetch gains nothing."""
        self._decisions: Decisions | None = None
        self._choice: Choice | None = None

    def follow(
        self,
        decisions: Decisions,
        request: str,
        here: Iterable[str] = (),
        choice: Choice | None = None,
    ) -> None:
        """Let the router hear what is told, on the running loop."""
        self._request, self.here, self._choice = request, frozenset(here), choice
        self._loop, self._decisions = asyncio.get_running_loop(), decisions
        if self._is_over:  # its client left while it waited; Serve goes on to choose
            self.over()

    @property
    def is_seen(self) -> bool:
        """Whether the router has looked at it; not while no engine runs, or many wait before it."""
        return self._decisions is not None

    def about(self, replica: str) -> dict[str, str | int | float]:
        """Return what the router predicted for a replica, as attributes of a span."""
        cost = self._cost(replica)
        if self._choice is None or cost is None:
            return {"kvray.route.reason": "fallback"}
        return {
            "kvray.route.reason": self._choice.reason,
            "kvray.route.candidates": len(self._choice.ranked),
            "kvray.route.first_token_s": cost.first_token_s,
            "kvray.route.queue_s": cost.queue_s,
            "kvray.tokens.pool": cost.pool_tokens,
            **{f"kvray.tokens.{at}": cost.tokens_from(at) for at in ("host", "disk", "remote")},
        }

    def near_tokens(self, replica: str) -> int | None:
        """Return how many of the prompt's tokens a replica need not compute; None: not known."""
        cost = self._cost(replica)
        return None if cost is None else cost.pool_tokens + sum(b.num_tokens for b in cost.brings)

    def _cost(self, replica: str) -> Cost | None:
        ranked = () if self._choice is None else self._choice.ranked
        return next((one.cost for one in ranked if one.cost.replica == replica), None)

    def sent(self, replica: str) -> None:
        """Tell that the request goes to a replica."""
        self.is_sent = True
        self._tell("sent", replica)

    def first_token(self) -> None:
        """Tell that the first token is there. Twice is fine."""
        self._tell("first_token")

    def over(self) -> None:
        """Tell that it has ended, however. Twice is fine."""
        self._is_over = True
        self._tell("over")

    def _tell(self, what: str, *about: str) -> None:
        if self._decisions is not None:
            call = partial(getattr(self._decisions, what), self._request, *about)
            self._loop.call_soon_threadsafe(partial(call, now=time.monotonic()))
