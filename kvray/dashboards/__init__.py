"""The Grafana dashboard and the Prometheus alerts, as files of the package kept by hand."""

from pathlib import Path

__all__ = ["ALERTS", "DASHBOARD", "package_file"]

DASHBOARD = "kvray.json"
"""The dashboard, in Grafana's model."""
ALERTS = "alerts.yml"
"""A rule file of Prometheus."""


def package_file(name: str) -> Path:
    """Return the path of `DASHBOARD` or `ALERTS`."""
    return Path(__file__).parent / name
