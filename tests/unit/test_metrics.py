"""The table of metrics and the page, the dashboard and the alerts that are made of them."""

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvray.dashboards import ALERTS, DASHBOARD, package_file
from kvray.metrics import METRICS, TIER_LABEL

ROOT = Path(__file__).parents[2]
LABELS = {
    *("node", "replica", "rank", "tier", "transport", "direction"),
    *("reason", "outcome", "action", "namespace", "part", "partition", "le", "memory"),
}


def test_names_say_what_is_counted_and_counters_end_in_total():
    for name, metric in METRICS.items():
        assert re.fullmatch(r"kvray_[a-z]+(_[a-z]+)*", name)
        assert name.endswith("_total") == (metric.kind == "counter")
        assert metric.help


def test_labels_are_few_and_none_could_carry_a_prompt():
    assert {label for metric in METRICS.values() for label in metric.labels} == LABELS


def test_the_page_has_every_metric_with_its_kind_and_labels_and_no_other():
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(kvray_\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|$", page, re.MULTILINE)

    documented = {name: (kind, labels.strip()) for name, kind, labels, _ in rows}

    assert documented == {
        name: (metric.kind, ", ".join(metric.labels)) for name, metric in METRICS.items()
    }
    assert {name: text for name, _, _, text in rows} == {
        name: metric.help for name, metric in METRICS.items()
    }


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(package_file(ALERTS).read_text())["groups"]
    return list(group["rules"])


def panels() -> list[dict[str, Any]]:
    return list(json.loads(package_file(DASHBOARD).read_text())["panels"])


def expressions() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (alert["expr"] for alert in alerts())


def test_expressions_ask_for_declared_metrics_by_labels_that_they_have():
    for expression in expressions():
        asked = re.findall(r"ray_(kvray_\w+)(?:\{([^}]*)\})?", expression)
        assert asked, expression
        for name, chosen in asked:
            assert name in METRICS, expression
            labels = {*METRICS[name].labels, TIER_LABEL}
            assert set(re.findall(r"(\w+)=", chosen)) <= labels, expression


def test_one_tier_of_several_can_be_looked_at():
    for panel in panels():
        for target in panel.get("targets", []):
            asked = re.findall(r"ray_kvray_\w+(.{28})?", target["expr"])
            assert set(asked) == {'{cluster_name=~"$cluster_name"'[:28]}, target["expr"]
    for alert in alerts():
        grouped = re.findall(r"(?:sum|max) by \((\w+)", alert["expr"])
        assert set(grouped) == {"cluster_name"}, alert["alert"]
        assert len(grouped) == alert["expr"].count("ray_kvray_"), alert["alert"]


def test_counters_are_asked_for_how_fast_they_grow():
    for expression in expressions():
        for name in re.findall(r"(?<!rate\()(?<!increase\()ray_(kvray_\w+)", expression):
            assert METRICS[name].kind == "gauge", expression


def test_lines_of_a_panel_have_letters_of_their_own():
    for panel in panels():
        letters = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(letters)) == len(letters), panel["title"]


def test_every_metric_that_engines_report_is_shown():
    shown = {name for one in expressions() for name in re.findall(r"ray_(kvray_\w+)", one)}

    hidden = {name for name in METRICS if name not in shown and not name.endswith("_count_total")}

    # What the tensor API and quotas say is for those who use them.
    few = {"stored_tokens_total", "errors_total", "quota_bytes", "shard_serving"}
    few |= {"repairs_total", "refused_stages_total", "resident_blocks", "lookup_entries"}
    few |= {"lookup_bytes", "lookup_queried_blocks_total", "lease_seconds_sum_total"}
    few |= {"stage_seconds_sum_total"}
    assert hidden == {f"kvray_{name}" for name in few}


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    shown = panels()

    assert len({panel["id"] for panel in shown}) == len(shown)
    places = [panel["gridPos"] for panel in shown]
    for one, other in itertools.combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_above
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_there_are_five_alerts_and_the_page_says_what_to_do_for_each():
    page = (ROOT / "docs" / "metrics.md").read_text()

    names = [alert["alert"] for alert in alerts()]

    assert len(names) == 5
    for name in names:
        assert f"| `{name}` |" in page


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not there")
def test_prometheus_itself_takes_the_alerts():
    command = ["promtool", "check", "rules", str(package_file(ALERTS))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 rules found" in done.stdout
