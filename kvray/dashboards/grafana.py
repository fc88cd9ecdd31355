"""Makes the dashboard's JSON of its panels: `python -m kvray.dashboards.grafana > kvray.json`."""

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

from kvray.dashboards.panels import GROUPS, Group, Panel

UID = "kvray"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's model."""
    return {
        "uid": UID,
        "title": "kvray",
        "description": "The KV-cache tier: hits, misses, bytes, latencies, health.",
        "tags": ["kvray", "ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": list(_panels()),
    }


def _variables() -> list[dict[str, Any]]:
    source = {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "label": "Data source",
        "hide": 0,
    }
    return [
        source,
        _variable("node", "Node", "label_values(ray_kvray_shard_serving, node)"),
        _variable("replica", "Replica", "label_values(ray_kvray_rank_connected, replica)"),
    ]


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels() -> Iterator[dict[str, Any]]:
    """Yield rows and panels from top to bottom."""
    ids, top = count(1), 0
    for group in GROUPS:
        yield _row(group, next(ids), top)
        top += 1
        for index, panel in enumerate(group.panels):
            row, column = divmod(index, _COLUMNS)
            place = {"x": column * _WIDTH, "y": top + row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            yield _panel(panel, next(ids), place)
        top += _HEIGHT * (1 + (len(group.panels) - 1) // _COLUMNS)


def _row(group: Group, panel_id: int, top: int) -> dict[str, Any]:
    return {
        "id": panel_id,
        "type": "row",
        "title": group.title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": top, "w": _WIDTH * _COLUMNS, "h": 1},
        "panels": [],
    }


def _panel(panel: Panel, panel_id: int, place: dict[str, int]) -> dict[str, Any]:
    custom = {
        "lineWidth": 1,
        "fillOpacity": 20 if panel.is_stacked else 0,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
    }
    limits = {"min": 0} if panel.maximum is None else {"min": 0, "max": panel.maximum}
    return {
        "id": panel_id,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "custom": custom, **limits},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "range": True,
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
