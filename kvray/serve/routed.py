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
    than kvray's it does nothing. The router may be on another event loop.
    """

    def __init__(self) -> None:
        self.is_sent = False
        self.here: frozenset[str] = frozenset()
        """Serve replica ids, their unique parts, to whose nodes nothing would have to be brought: a
        prefetch would gain nothing."""
        self._has_token = False
        self._decisions: Decisions | None = None
        self._choice: Choice | None = None

    def follow(
        self,
        decisions: Decisions,
        request: str,
        prefix: str,
        here: Iterable[str] = (),
        choice: Choice | None = None,
    ) -> None:
        """Let the router hear what is told, on the running loop; names are `prefix` and an id."""
        self._request, self._prefix, self.here = request, prefix, frozenset(here)
        self._choice = choice
        self._loop = asyncio.get_running_loop()
        self._decisions = decisions

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
            "kvray.tokens.host": cost.tokens_from("host"),
            "kvray.tokens.disk": cost.tokens_from("disk"),
            "kvray.tokens.remote": cost.tokens_from("remote"),
        }

    def near_tokens(self, replica: str) -> int | None:
        """Return how many of the prompt's tokens a replica need not compute; None: not known."""
        cost = self._cost(replica)
        return None if cost is None else cost.pool_tokens + sum(b.num_tokens for b in cost.brings)

    def _cost(self, replica: str) -> Cost | None:
        ranked = () if self._choice is None else self._choice.ranked
        return next((one.cost for one in ranked if one.cost.replica == replica), None)

    def sent(self, replica_id: str) -> None:
        """Tell that the request goes to a replica, by the unique part of its Serve replica id."""
        self.is_sent = True
        if self._decisions is not None:
            self._tell(partial(self._decisions.sent, self._request, self._prefix + replica_id))

    def first_token(self) -> None:
        """Tell that the first token is there; of later ones nothing is told."""
        if self._decisions is not None and not self._has_token:
            self._has_token = True
            self._tell(partial(self._decisions.first_token, self._request))

    def over(self) -> None:
        """Tell that it has ended, however. Twice is fine."""
        if self._decisions is not None:
            self._tell(partial(self._decisions.over, self._request))

    def _tell(self, what: "partial[None]") -> None:
        self._loop.call_soon_threadsafe(partial(what, now=time.monotonic()))
