"""What the metrics ports of Ray nodes say of kvray, read as Prometheus reads it."""

from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

OFTEN = {"RAY_metrics_report_interval_ms": "1000"}
"""Variables of nodes whose figures are to be there soon; Ray's own interval is ten seconds."""

_PREFIX = "ray_kvray_"


def scrape(temp_dir: Path) -> list[Sample]:
    """Return the samples of kvray's metrics of all nodes with `temp_dir` as they are now."""
    families: list[Metric] = []
    files = temp_dir.glob("session_2*/metrics_export_port_*")
    for port in {file.read_text() for file in files}:
        # Some are of nodes that have left, or of sessions before this one.
        with suppress(URLError), urlopen(f"http://127.0.0.1:{port}", timeout=10) as answer:
            families += text_string_to_metric_families(answer.read().decode())
    return [one for family in families for one in family.samples if one.name.startswith(_PREFIX)]


def total(samples: list[Sample], metric: str, /, **labels: str) -> int:
    """Return the sum of those samples of a metric that have `labels`; 0 if there are none."""
    meant = (one for one in samples if one.name == f"{_PREFIX}{metric}")
    return round(sum(one.value for one in meant if labels.items() <= one.labels.items()))
