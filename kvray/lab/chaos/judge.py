"""The verdict on a run, and its report: counts, hits, stalls, how soon hits were back."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from kvray.console.output import empty_table
from kvray.lab.chaos.schedule import KINDS
from kvray.lab.chaos.servers import Losses, Served
from kvray.lab.chaos.stalls import MATCH, PASS
from kvray.lab.report import Report
from kvray.reference import Output

IN_FLIGHT_MIN = 10
_BACK_SHARE = 0.5
"""Hits are back when a replica finds this part of what it finds without faults."""
_TELLING_SHARE = 0.1
"""Where less is found without faults, a batch shows nothing."""
_LOSSES = ("engine_deaths", "hung_requests", "failed_requests", "unsettled_nodes")
_NAN, _INFINITY = float("nan"), float("inf")

Stalls = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """The result of one fault of the schedule. Times are monotonic."""

    kind: str
    began: float
    ended: float
    in_flight: int
    skipped: str | None = None


@dataclass(slots=True, kw_only=True)
class Results:
    """The results of all replicas of one run."""

    served: list[Served] = field(default_factory=list)
    joined: list[Served] = field(default_factory=list)
    """The answers of replicas on nodes that joined and went."""
    losses: Losses = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    stalls: Stalls = field(default_factory=lambda: np.empty((0, 4)))
    strikes: list[Strike] = field(default_factory=list)


def hit_share(served: Iterable[Served]) -> float:
    """Return the share of hits in all tokens that an engine did not find in its own pool."""
    outputs = _outputs(served)
    hits = sum(one.hit_tokens for one in outputs)
    return hits / max(1, sum(one.prompt_tokens - one.reused_tokens for one in outputs))


def hit_tokens_ratio(served: Sequence[Served], calm: Sequence[Served]) -> float:
    """Return hit tokens per prompt token, relative to the run without faults."""
    ours, usual = (
        sum(one.hit_tokens for one in outputs) / max(1, sum(one.prompt_tokens for one in outputs))
        for outputs in (_outputs(served), _outputs(calm))
    )
    return ours / max(1e-9, usual)


def stall_p99_ms(stalls: Stalls) -> float:
    """Return the larger of both calls' 99th percentiles, less the waits for a core."""
    net_ms = np.maximum(stalls[:, 2] - stalls[:, 3], 0.0) * 1000.0
    found = [net_ms[stalls[:, 0] == kind] for kind in (MATCH, PASS)]
    return max((float(np.percentile(one, 99)) for one in found if len(one)), default=0.0)


def recoveries(
    strikes: Sequence[Strike], served: Sequence[Served], calm: Sequence[Served]
) -> list[float]:
    """Return for each strike how long after its end all replicas found their hits again.

    A replica finds them again with the end of the first batch that began after the strike and found
    half of the usual: the share that batches of its place in a phase find without faults. Places
    where that is next to nothing show nothing. If hits were not back by the end of the run, it is
    the time until then. NaN: the fault did not strike; another one did before hits were back; or
    no batch shows anything. Of strikes that overlap, only the last is counted.
    """
    usual = {place: hit_share(some) for place, some in _grouped(calm, "place").items()}
    replicas = list(_grouped(served, "replica").values())

    def recovery(strike: Strike) -> float:
        if strike.skipped is not None:
            return _NAN
        back = max((_first_good(one, strike.ended, usual) for one in replicas), default=_NAN)
        is_disturbed = any(
            other is not strike and other.began < back and other.ended > strike.ended
            for other in strikes
            if other.skipped is None
        )
        return _NAN if is_disturbed or back == _INFINITY else back - strike.ended

    return [recovery(strike) for strike in strikes]


def report(found: Results, calm: Results) -> dict[str, Any]:
    """Return all figures of a run, and of the one without faults, as JSON takes them."""
    made = [strike for strike in found.strikes if strike.skipped is None]
    back = recoveries(found.strikes, found.served, calm.served)
    last = sorted(made, key=lambda strike: strike.ended)[-1:]
    return {
        "faults_injected": len(made),
        "faults": dict(Counter(strike.kind for strike in made)),
        "requests": len(_outputs((*found.served, *found.joined))),
        "wrong_tokens": sum(
            one.wrong_tokens for one in (*found.served, *found.joined, *calm.served)
        ),
        **{name: found.losses[name] + calm.losses[name] for name in _LOSSES},
        "injected_engine_deaths": found.losses["injected_deaths"],
        "requests_lost_to_injected_deaths": found.losses["injected_requests"],
        "hit_tokens_ratio": round(hit_tokens_ratio(found.served, calm.served), 4),
        "stall_ms_p99": round(stall_p99_ms(found.stalls), 3),
        "recovery_s_max": _longest(back),
        "recovery_s_last": _longest(recoveries(last, found.served, calm.served)),
        "in_flight_min": min((strike.in_flight for strike in made), default=0),
        "by_kind": _by_kind(found.strikes, back),
        "hit_share": round(hit_share(found.served), 4),
        "joined": {
            "requests": len(_outputs(found.joined)),
            "hit_share": round(hit_share(found.joined), 4),
        },
        "fault_free": {
            "requests": len(_outputs(calm.served)),
            "hit_share": round(hit_share(calm.served), 4),
            "stall_ms_p99": round(stall_p99_ms(calm.stalls), 3),
        },
        "failures": [*calm.failures, *found.failures],
    }


def has_passed(found: dict[str, Any]) -> bool:
    """Return whether no token was wrong, nothing was lost beyond the faults, and all is back."""
    return not any(found[name] for name in ("wrong_tokens", *_LOSSES))


def _by_kind(strikes: Sequence[Strike], back: Sequence[float]) -> dict[str, dict[str, Any]]:
    found = {}
    for kind in dict.fromkeys(strike.kind for strike in strikes):
        mine = [(one, s) for one, s in zip(strikes, back, strict=True) if one.kind == kind]
        struck = [one.in_flight for one, _ in mine if one.skipped is None]
        found[kind] = {
            "struck": len(struck),
            "skipped": dict(Counter(one.skipped for one, _ in mine if one.skipped is not None)),
            "in_flight_min": min(struck, default=None),
            "recovery_s_max": _longest([seconds for _, seconds in mine]),
        }
    return found


def _longest(seconds: Sequence[float]) -> float | None:
    """Return the longest recovery; None if none was measured."""
    measured = [one for one in seconds if one == one]
    return round(max(measured), 2) if measured else None


def _first_good(served: Sequence[Served], after: float, usual: dict[Any, float]) -> float:
    """Return when a replica had answered the first batch that shows that hits are back.

    If none does, return the end of the last batch that shows the contrary; infinity without one.
    """
    average = sum(usual.values()) / max(1, len(usual))
    at_least = _INFINITY
    for batch in served:
        expected = usual.get(batch.place, average)
        if batch.began < after or expected < _TELLING_SHARE:
            continue
        at_least = batch.ended
        if hit_share([batch]) >= _BACK_SHARE * expected:
            break
    return at_least


def _grouped(served: Iterable[Served], name: str) -> dict[Any, list[Served]]:
    """Return the batches, in their order, by the value of their attribute `name`."""
    groups: defaultdict[Any, list[Served]] = defaultdict(list)
    for batch in served:
        groups[getattr(batch, name)].append(batch)
    return groups


def _outputs(served: Iterable[Served]) -> list[Output]:
    return [output for batch in served for output in batch.outputs]


def chaos_report(found: dict[str, Any]) -> Report:
    """Return the report: one row for each kind of fault that was due, figures and the verdict."""
    numbers = ("struck", "in flight\nat least", "hits back\nwithin")
    table = empty_table("fault", numbers=numbers, rest=["did not strike"])
    for kind in KINDS:
        if (row := found["by_kind"].get(kind.name)) is not None:
            least, back = row["in_flight_min"], row["recovery_s_max"]
            table.add_row(
                kind.text,
                str(row["struck"]),
                "" if least is None else str(least),
                "" if back is None else f"{back:.1f} s",
                ", ".join(f"{count}: {reason}" for reason, count in row["skipped"].items()),
            )
    result = "passed" if has_passed(found) else "failed"
    settings = ", ".join(
        f"{section}.{name} {value}"
        for section, each in found["settings"].items()
        for name, value in each.items()
    )
    parts: list[str | Table] = [
        table,
        f"{found['requests']} requests, {found['faults_injected']} faults; hits are"
        f" {found['hit_tokens_ratio']:.0%} of those without faults.",
        f"Scheduler stalls, 99th percentile: {found['stall_ms_p99']:.1f} ms.",
        *(f"{kind} was left out: {reason}." for kind, reason in found["skipped_kinds"].items()),
        f"Settings: {settings}.",
        *(f"✘ {failure}" for failure in found["failures"]),
        f"Verdict: {result}, {found['wrong_tokens']} wrong tokens; beyond the injected faults"
        f" {found['engine_deaths']} engine deaths, {found['hung_requests']} hung requests and"
        f" {found['unsettled_nodes']} nodes that are not back to normal.",
    ]
    return Report(parts=parts, facts=found, has_failed=not has_passed(found))
