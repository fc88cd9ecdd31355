"""What people see of the metrics: a Grafana dashboard and Prometheus alerts, as package data."""

from pathlib import Path

__all__ = ["ALERTS", "DASHBOARD", "package_file"]

DASHBOARD = "kvray.json"
"""The dashboard, as `grafana.py` makes it."""
ALERTS = "alerts.yml"
"""A rule file of Prometheus."""


def package_file(name: str) -> Path:
    """Return where `DASHBOARD` or `ALERTS` is."""
    return Path(__file__).parent / name
