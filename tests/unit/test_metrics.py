"""The table of metrics: names, labels, and the page that explains them."""

import re
from pathlib import Path

from kvray.metrics import METRICS

ROOT = Path(__file__).parents[2]
LABELS = {
    *("node", "replica", "rank", "tier", "transport", "direction"),
    *("reason", "outcome", "action", "namespace", "part", "partition", "le", "memory"),
}


def test_names_say_what_is_counted_and_counters_end_in_total() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"kvray_[a-z]+(_[a-z]+)*", name)
        assert name.endswith("_total") == (metric.kind == "counter")
        assert metric.help


def test_labels_are_few_and_none_could_carry_a_prompt() -> None:
    assert {label for metric in METRICS.values() for label in metric.labels} == LABELS


def test_the_page_has_every_metric_with_its_kind_and_labels_and_no_other() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(kvray_\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|$", page, re.MULTILINE)

    documented = {name: (kind, labels.strip()) for name, kind, labels, _ in rows}

    assert documented == {
        name: (metric.kind, ", ".join(metric.labels)) for name, metric in METRICS.items()
    }
    assert {name: text for name, _, _, text in rows} == {
        name: metric.help for name, metric in METRICS.items()
    }
