"""What the metrics port of one Ray node says of kvray, read as Prometheus reads it."""

import urllib.request
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

OFTEN = {"RAY_metrics_report_interval_ms": "1000"}
"""Variables of nodes whose figures are to be there soon; Ray's own interval is ten seconds."""

_PREFIX = "ray_kvray_"


def scrape(temp_dir: Path) -> list[Sample]:
    """Return the samples of kvray's metrics that the port of the node with `temp_dir` has now."""
    ports = temp_dir.glob("session_2*/metrics_export_port_*")  # some of sessions before this one
    port = max(ports, key=lambda one: one.stat().st_mtime)
    with urllib.request.urlopen(f"http://127.0.0.1:{port.read_text()}", timeout=10) as answer:
        families: list[Metric] = list(text_string_to_metric_families(answer.read().decode()))
    return [one for family in families for one in family.samples if one.name.startswith(_PREFIX)]


def total(samples: list[Sample], metric: str, /, **labels: str) -> int:
    """Return the sum of those samples of a metric that have `labels`; 0 if there are none."""
    meant = (one for one in samples if one.name == f"{_PREFIX}{metric}")
    return round(sum(one.value for one in meant if labels.items() <= one.labels.items()))
