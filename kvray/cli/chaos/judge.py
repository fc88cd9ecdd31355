"""What follows from a run: counts, the share of hits, stalls, and how soon hits were back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvray.cli.chaos.servers import Losses, Served
from kvray.cli.chaos.stalls import MATCH, PASS

IN_FLIGHT_MIN = 10
_BACK_SHARE = 0.5
"""Hits are back when a replica finds this part of what it finds without faults."""
_TELLING_SHARE = 0.1
"""Where less is found without faults, a batch tells nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Prompts that a replica was asked together, and the share of hits in them."""

    began: float
    ended: float
    place: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What became of one fault of the schedule. Times are monotonic."""

    kind: str
    began: float
    ended: float
    in_flight: int
    skipped: str | None = None
    """Why it did not strike."""


@dataclass(slots=True, kw_only=True)
class Run:
    """What the replicas of one run did; those with an empty connector are not among them."""

    began: float
    served: list[Served] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)
    failures: list[str] = field(default_factory=list)
    stalls: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 4)))
    control_stalls: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 4)))


def hit_share(served: Sequence[Served]) -> float:
    """Return the share of hits in all tokens that an engine did not find in its own pool."""
    hits = sum(one.hit_tokens for one in served)
    return hits / max(1, sum(one.prompt_tokens - one.reused_tokens for one in served))


def hit_tokens_ratio(run: Run, calm: Run) -> float:
    """Return hit tokens per prompt token in relation to the run without faults."""
    return _hits_per_token(run.served) / max(1e-9, _hits_per_token(calm.served))


def stall_p99_ms(stalls: npt.NDArray[np.float64]) -> float:
    """Return the larger of both calls' 99th percentiles, less the waits for a core."""
    found = [_net_ms(stalls, kind) for kind in (MATCH, PASS)]
    return max((float(np.percentile(one, 99)) for one in found if len(one)), default=0.0)


def stall_figures(stalls: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the percentiles of each of the two calls, in milliseconds."""
    figures: dict[str, float] = {}
    for name, kind in (("match", MATCH), ("pass", PASS)):
        net = _net_ms(stalls, kind)
        if len(net):
            for title, at in (("p50", 50), ("p99", 99), ("max", 100)):
                figures[f"{name}_{title}_ms"] = round(float(np.percentile(net, at)), 3)
            figures[f"{name}_calls"] = len(net)
    return figures


def recoveries(strikes: Sequence[Strike], served: Sequence[Served], calm: Run) -> list[float]:
    """Return for each strike how long after its end all replicas found their hits again.

    That is when the first batch has been answered that began after the end and found at least half
    of what batches of its place in a chapter find without faults; places where those find next to
    nothing tell nothing. Where hits were not back by the end of the run it is the time until then.
    NaN: it did not strike; another one did before hits were back; or nothing tells. Only the last
    of several that overlap is counted.
    """
    usual = _usual_shares(calm.served)
    batches = _batches(served)
    made = [strike for strike in strikes if strike.skipped is None]
    found = []
    for strike in strikes:
        if strike.skipped is not None:
            found.append(float("nan"))
            continue
        back = max(
            (_first_good(of_one, strike.ended, usual) for of_one in batches.values()),
            default=float("nan"),
        )
        is_disturbed = any(
            other is not strike and other.began < back and other.ended > strike.ended
            for other in made
        )
        found.append(float("nan") if is_disturbed or back == np.inf else back - strike.ended)
    return found


def report(run: Run, calm: Run, strikes: Sequence[Strike]) -> dict[str, Any]:
    """Return everything that is told about a run, as JSON takes it."""
    made = [strike for strike in strikes if strike.skipped is None]
    back = recoveries(strikes, run.served, calm)
    measured = [seconds for seconds in back if seconds == seconds]
    losses, was = run.losses, calm.losses
    return {
        "faults_injected": len(made),
        "faults": _count(strike.kind for strike in made),
        "requests": len(run.served),
        "wrong_tokens": sum(one.wrong_tokens for one in (*run.served, *calm.served)),
        "engine_deaths": losses.engine_deaths + was.engine_deaths,
        "hung_requests": losses.hung_requests + was.hung_requests,
        "failed_requests": losses.failed_requests + was.failed_requests,
        "injected_engine_deaths": losses.injected_deaths,
        "requests_lost_to_injected_deaths": losses.injected_requests,
        "hit_tokens_ratio": round(hit_tokens_ratio(run, calm), 4),
        "stall_ms_p99": round(stall_p99_ms(run.stalls), 3),
        "control_stall_ms_p99": round(stall_p99_ms(run.control_stalls), 3),
        "recovery_s_max": round(max(measured), 2) if measured else None,
        "recovery_s_last": _recovery_of_last(made, run, calm),
        "in_flight_min": min((strike.in_flight for strike in made), default=0),
        "by_kind": _by_kind(strikes, back),
        "stalls": stall_figures(run.stalls),
        "control_stalls": stall_figures(run.control_stalls),
        "hit_share": round(hit_share(run.served), 4),
        "fault_free": {
            "requests": len(calm.served),
            "hit_share": round(hit_share(calm.served), 4),
            "stall_ms_p99": round(stall_p99_ms(calm.stalls), 3),
        },
        "failures": [*calm.failures, *run.failures],
    }


def has_passed(found: dict[str, Any]) -> bool:
    """Return whether nothing happened that must not happen."""
    names = ("wrong_tokens", "engine_deaths", "hung_requests", "failed_requests")
    return not any(found[name] for name in names)


def _by_kind(strikes: Sequence[Strike], back: Sequence[float]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for strike, seconds in zip(strikes, back, strict=True):
        of_kind = found.setdefault(
            strike.kind,
            {"struck": 0, "skipped": {}, "in_flight_min": None, "recovery_s_max": None},
        )
        if strike.skipped is not None:
            skipped = of_kind["skipped"]
            skipped[strike.skipped] = skipped.get(strike.skipped, 0) + 1
            continue
        of_kind["struck"] += 1
        least = of_kind["in_flight_min"]
        of_kind["in_flight_min"] = (
            strike.in_flight if least is None else min(least, strike.in_flight)
        )
        if seconds == seconds:
            of_kind["recovery_s_max"] = round(max(of_kind["recovery_s_max"] or 0.0, seconds), 2)
    return found


def _first_good(batches: Sequence[_Batch], after: float, usual: dict[int, float]) -> float:
    """Return when the first batch of a replica was answered that tells that hits are back.

    If none does, it took at least until the last one that tells that they were not; infinity if
    none tells anything.
    """
    average = sum(usual.values()) / max(1, len(usual))
    at_least = float("inf")
    for batch in batches:
        wanted = usual.get(batch.place, average)
        if batch.began < after or wanted < _TELLING_SHARE:
            continue
        if batch.share >= _BACK_SHARE * wanted:
            return batch.ended
        at_least = batch.ended
    return at_least


def _usual_shares(served: Sequence[Served]) -> dict[int, float]:
    """Return place in a chapter -> share of hits there."""
    places: dict[int, list[Served]] = {}
    for one in served:
        places.setdefault(one.place, []).append(one)
    return {place: hit_share(ones) for place, ones in places.items()}


def _batches(served: Sequence[Served]) -> dict[str, list[_Batch]]:
    """Return the batches of each replica, in order."""
    groups: dict[tuple[str, float], list[Served]] = {}
    for one in served:
        groups.setdefault((one.replica, one.began), []).append(one)
    found: dict[str, list[_Batch]] = {}
    for (replica, began), batch in sorted(groups.items()):
        ended, place = batch[0].ended, batch[0].place
        made = _Batch(began=began, ended=ended, place=place, share=hit_share(batch))
        found.setdefault(replica, []).append(made)
    return found


def _hits_per_token(served: Sequence[Served]) -> float:
    return sum(one.hit_tokens for one in served) / max(1, sum(one.prompt_tokens for one in served))


def _net_ms(stalls: npt.NDArray[np.float64], kind: float) -> npt.NDArray[np.float64]:
    chosen = stalls[stalls[:, 0] == kind]
    net: npt.NDArray[np.float64] = np.maximum(chosen[:, 2] - chosen[:, 3], 0.0) * 1000.0
    return net


def _recovery_of_last(made: Sequence[Strike], run: Run, calm: Run) -> float | None:
    """Return how long after the last fault hits were back; None: nothing tells."""
    if not made:
        return None
    last = max(made, key=lambda strike: strike.ended)
    (seconds,) = recoveries([last], run.served, calm)
    return None if seconds != seconds else round(seconds, 2)


def _count(names: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return found
