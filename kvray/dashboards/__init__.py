"""What people see of the metrics: a Grafana dashboard and Prometheus alerts, as package data."""

from importlib import resources
from importlib.resources.abc import Traversable

__all__ = ["ALERTS", "DASHBOARD", "package_file"]

DASHBOARD = "kvray.json"
"""The dashboard, as `grafana.py` makes it."""
ALERTS = "alerts.yml"
"""A rule file of Prometheus."""


def package_file(name: str) -> Traversable:
    """Return `DASHBOARD` or `ALERTS` as a file."""
    return resources.files(__name__) / name
