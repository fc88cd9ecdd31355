"""Renders kvray's chart as `helm template` does, by Helm's own engine.

The engine is Go: it gets a process of its own, so that its threads and signal handlers are no
concern of the tests.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvray.config.schema import json_schema

CHART = Path(__file__).parents[1] / "examples" / "helm" / "kvray"
SCHEMA = CHART / "values.schema.json"

_RENDER = """
import json, sys
import helm_python as helm

values = json.loads(sys.argv[2])
try:
    with helm.Chart.load(sys.argv[1]) as chart:
        chart.validate_schema(chart.merge_values(values))
        print(json.dumps(chart.render(values, name="kvray", namespace="default")))
except helm.HelmError as error:
    sys.exit(str(error))
"""


class Refused(Exception):
    """The chart was not rendered; the message is Helm's."""


def render(values: dict[str, Any]) -> dict[str, str]:
    """Return the text of each template by its file's name, for a release `kvray`."""
    done = subprocess.run(
        [sys.executable, "-c", _RENDER, CHART, json.dumps(values)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise Refused(done.stderr.strip())
    return {Path(path).name: text for path, text in json.loads(done.stdout).items()}


def config_schema() -> dict[str, Any]:
    """Return the schema of kvray.yaml as the chart has it: Helm leaves out sections that are null."""
    schema = json.loads(json_schema())
    for found in schema["properties"].values():
        if "anyOf" in found:
            found["$ref"] = found.pop("anyOf")[0]["$ref"]
    return {"$id": "kvray.yaml", **schema}


def write_config_schema() -> None:
    """Bring the chart's copy of that schema, which is one line, up to date."""
    old = json.dumps(json.loads(SCHEMA.read_text())["$defs"]["config"])
    new = json.dumps(config_schema())
    SCHEMA.write_text(SCHEMA.read_text().replace(f'"config": {old}', f'"config": {new}'))
