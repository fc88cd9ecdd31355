"""The table of metrics and the page, the dashboard and the alerts that are made of them."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from kvray.dashboards import ALERTS, DASHBOARD, package_file
from kvray.metrics import METRICS, TIER_LABEL
from tests.forks import run

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "metrics.md").read_text()


def test_names_say_what_is_counted_and_counters_end_in_total():
    for name, metric in METRICS.items():
        assert re.fullmatch(r"kvray_[a-z]+(_[a-z]+)*", name)
        assert name.endswith("_total") == (metric.kind == "counter")
        assert metric.help
    # Labels are few, and none could carry a prompt.
    assert {label for metric in METRICS.values() for label in metric.labels} == {
        *("node", "replica", "rank", "tier", "transport", "direction"),
        *("reason", "outcome", "action", "namespace", "part", "partition", "le", "memory"),
    }


def test_the_page_has_every_metric_with_its_kind_and_labels_and_no_other():
    rows = re.findall(r"^\| `(kvray_\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|$", PAGE, re.MULTILINE)
    documented = {name: (kind, labels.strip(), text) for name, kind, labels, text in rows}
    assert documented == {
        name: (one.kind, ", ".join(one.labels), one.help) for name, one in METRICS.items()
    }


(ALERT_GROUP,) = yaml.safe_load(package_file(ALERTS).read_text())["groups"]
ALERT_RULES = ALERT_GROUP["rules"]
PANELS = json.loads(package_file(DASHBOARD).read_text())["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
EXPRESSIONS = [*QUERIES, *(alert["expr"] for alert in ALERT_RULES)]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_ask_for_declared_metrics_by_their_labels_and_how_fast_counters_grow(
    expression,
):
    asked = re.findall(r"ray_(kvray_\w+)(?:\{([^}]*)\})?", expression)
    assert asked
    for name, chosen in asked:
        assert set(re.findall(r"(\w+)=", chosen)) <= {*METRICS[name].labels, TIER_LABEL}
    for name in re.findall(r"(?<!rate\()(?<!increase\()ray_(kvray_\w+)", expression):
        assert METRICS[name].kind == "gauge"


def test_one_tier_of_several_can_be_looked_at():
    for query in QUERIES:
        asked = re.findall(r"ray_kvray_\w+(.{28})?", query)
        assert set(asked) == {'{cluster_name=~"$cluster_name"'[:28]}, query
    for alert in ALERT_RULES:
        grouped = re.findall(r"(?:sum|max) by \((\w+)", alert["expr"])
        assert set(grouped) == {"cluster_name"}, alert["alert"]
        assert len(grouped) == alert["expr"].count("ray_kvray_"), alert["alert"]


def test_every_metric_that_engines_report_is_shown():
    shown = {name for one in EXPRESSIONS for name in re.findall(r"ray_(kvray_\w+)", one)}
    hidden = {name for name in METRICS if name not in shown and not name.endswith("_count_total")}
    # What the tensor API and quotas say is for those who use them.
    few = {"stored_tokens_total", "errors_total", "quota_bytes", "shard_serving"}
    few |= {"repairs_total", "refused_stages_total", "resident_blocks", "lookup_entries"}
    few |= {"lookup_bytes", "lookup_queried_blocks_total", "lease_seconds_sum_total"}
    few |= {"stage_seconds_sum_total"}
    assert hidden == {f"kvray_{name}" for name in few}


def test_the_dashboard_begins_with_large_figures_and_panels_are_told_apart_and_have_units():
    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert rows[:5] == ["Now", "Hits", "Memory", "Transfers", "Faults"]
    assert [panel["type"] for panel in PANELS[1:9]] == ["stat"] * 8
    shown = [panel for panel in PANELS if panel["type"] != "row"]
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in shown)
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    (time,) = [panel for panel in shown if panel["title"].startswith("Share of its time")]
    assert "by (replica)" not in time["targets"][0]["expr"], "each rank may have a leader"
    for panel in PANELS:
        letters = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(letters)) == len(letters), panel["title"]
    places = [panel["gridPos"] for panel in PANELS]
    for one, other in itertools.combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_above
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_there_are_five_alerts_and_each_names_its_place_on_the_page_on_failures():
    assert len(ALERT_RULES) == 5
    for alert in ALERT_RULES:
        page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        headings = re.findall("^#+ (.*)$", (DOCS.parent / page).read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not there")
def test_prometheus_itself_takes_the_alerts():
    done = run("promtool", "check", "rules", package_file(ALERTS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 rules found" in done.stdout
