"""Renders and lints kvray's chart as `helm` does, by Helm's own engine.

The engine is Go: it gets a process of its own, so that its threads and signal handlers are no
concern of the tests.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvray.config.sections import json_schema
from kvray.dashboards import ALERTS, package_file
from tests.forks import run

CHART = Path(__file__).parents[1] / "examples" / "helm" / "kvray"
SCHEMA = CHART / "values.schema.json"
ALERTS_COPY = CHART / "alerts.yml"

_PROGRAM = """
import json, sys
import helm_python as helm

path, values = sys.argv[1], json.loads(sys.argv[2])
try:
    with helm.Chart.load(path) as chart:
        chart.validate_schema(chart.merge_values(values))
        rendered = chart.render(values, name="kvray", namespace="default")
    print(json.dumps([rendered, helm.lint(path)]))
except helm.HelmError as error:
    sys.exit(str(error))
"""


class Refused(Exception):
    """The chart was not rendered; the message is Helm's."""


def render(values: dict[str, Any]) -> dict[str, str]:
    """Return the text of each template by its file's name, for a release `kvray`."""
    rendered, _ = _run(values)
    return {Path(path).name: text for path, text in rendered.items()}


def lint() -> list[str]:
    """Return the warnings and errors of `helm lint`."""
    _, found = _run({})
    return found["errors"] + [one["error"] for one in found["messages"] if one["severity"] > 1]


def config_schema() -> dict[str, Any]:
    """Return the schema of kvray.yaml as the chart has it.

    Helm leaves out what is null, and nodes of one worker group have the same labels.
    """
    schema = json.loads(json_schema())
    del schema["properties"]["nodes"]
    for found in schema["properties"].values():
        if "anyOf" in found:
            found["$ref"] = found.pop("anyOf")[0]["$ref"]
    return {"$id": "kvray.yaml", **schema}


def write_copies() -> None:
    """Bring the chart's copies of the alerts, and of that schema, which is one line, up to date."""
    ALERTS_COPY.write_text(package_file(ALERTS).read_text())
    old = json.dumps(json.loads(SCHEMA.read_text())["$defs"]["config"])
    new = json.dumps(config_schema())
    SCHEMA.write_text(SCHEMA.read_text().replace(f'"config": {old}', f'"config": {new}'))


def _run(values: dict[str, Any]) -> Any:
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("helm-python-sdk has no wheel for this machine")
    done = run(sys.executable, "-c", _PROGRAM, CHART, json.dumps(values), timeout=60)
    if done.returncode:
        raise Refused(done.stderr.strip())
    return json.loads(done.stdout)
