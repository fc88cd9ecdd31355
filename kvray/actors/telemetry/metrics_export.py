"""Gives an actor's figures to Ray, which exports them on the node's Prometheus port."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.util import metrics

from kvray.actors.telemetry.figures import Figures, Increments, Series
from kvray.errors import KVRayError
from kvray.metrics import METRICS, PREFIX, TIER_LABEL

_log = logging.getLogger("kvray.metrics")

Look = Callable[[float], Figures]
"""Returns the figures of now, which it is given."""

EXPORT_S = 1.0
"""How often Ray gets figures; it exports them every `metrics_report_interval_ms`."""

_REST = 50
"""Ratio of a pause to the look before it: 2 % of a core, however large the tables."""
_PAUSE_MAX_S = 10.0
"""Ray forgets a gauge that nobody sets for two of its intervals, of 10 s each."""

_JOIN_S = 1.0
_SERIES_MAX = 20_000
_NOTHING = 1e-30
"""The first increment of a series: Ray makes none for 0. It vanishes in the first real increment,
which Prometheus would not count if the series began with it."""


class MetricsExport:
    """Gives figures to Ray; for one thread at a time.

    It logs an error once and tries again: no actor ends for want of figures.
    """

    def __init__(self, cluster_name: str) -> None:
        self._tier = {TIER_LABEL: cluster_name}
        self._increments: Increments[Series] = Increments()
        self._objects: dict[str, Any] = {}
        self._counters: set[Series] = set()
        self._gauges: set[Series] = set()
        self._due = 0.0
        self._said = ""

    def attempt(self, look: Look, now: float) -> None:
        """Give Ray the figures of `look`, if it is time; raises nothing.

        The more work a look is, the longer is the pause after it.
        """
        if now < self._due:
            return
        began_s = time.thread_time()  # of work, not of waiting for a core
        try:
            self.give(look(now))
        except KVRayError as error:
            _log.debug("no figures while a part starts or ends: %s", error)
        except Exception as error:  # noqa: BLE001 - see the class; it is logged
            if self._said != repr(error):
                self._said = repr(error)
                _log.exception("the export of figures failed and will be tried again")
        rest_s = _REST * (time.thread_time() - began_s)
        self._due = now + min(max(EXPORT_S / 2, rest_s), _PAUSE_MAX_S)

    def give(self, figures: Figures) -> None:
        """Give Ray `figures`; a gauge of the last call that is missing now becomes 0."""
        for one in figures.totals:
            before = one.counted_before
            grown = self._increments.take(one.source, one.totals, counted_before=before)
            for series, by in grown.items():
                self._increase(series, by)
        self._increments.retain({one.source for one in figures.totals})
        gauges = {**dict.fromkeys(self._gauges, 0.0), **figures.gauges}
        for (name, values), value in gauges.items():
            self._object(name).set(float(value), tags=_tags(name, values))
        self._gauges = set(figures.gauges)

    def _increase(self, series: Series, by: float) -> None:
        if series not in self._counters:
            if len(self._counters) >= _SERIES_MAX:
                return
            self._counters.add(series)
            by = by or _NOTHING
        if by > 0:
            name, values = series
            self._object(name).inc(by, tags=_tags(name, values))

    def _object(self, name: str) -> Any:
        made = self._objects.get(name)
        if made is None:
            declared = METRICS[PREFIX + name]
            kind = metrics.Counter if declared.kind == "counter" else metrics.Gauge
            made = kind(declared.name, declared.help, tag_keys=(*declared.labels, TIER_LABEL))
            made.set_default_tags(self._tier)
            self._objects[name] = made
        return made


class MetricsThread:
    """Looks at an actor's figures every `every_s` and gives them to Ray, beside its work."""

    def __init__(self, look: Look, cluster_name: str, *, every_s: float = EXPORT_S) -> None:
        """Begin; the thread calls `look` with the time."""
        self._look = look
        self._every_s = every_s
        self._export = MetricsExport(cluster_name)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvray-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Twice is fine."""
        self._stopping.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            self._export.attempt(self._look, time.monotonic())


def _tags(name: str, values: tuple[str, ...]) -> Mapping[str, str]:
    return dict(zip(METRICS[PREFIX + name].labels, values, strict=True))
