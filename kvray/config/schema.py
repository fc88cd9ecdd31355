"""The JSON schema of kvray.yaml, and the table of settings that follows from it."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from kvray.config.sections import KVRayConfig, NodeConfig

NOT_BY_LABEL = ("arena.dir", "arena.lock_wait_s")
"""Settings that engines read too, which do not know what labels Ray has given to their node."""


class SettingRow(NamedTuple):
    """One setting, as tables show it."""

    name: str
    """Dotted."""
    kind: str
    default: str
    description: str


@cache
def json_schema() -> str:
    """Return the schema of a configuration file, as JSON text."""
    schema = KVRayConfig.model_json_schema()
    sections = schema["$defs"]
    defaults = KVRayConfig().model_dump(mode="json")
    _amend(schema["properties"], defaults)
    for name, found in schema["properties"].items():
        if "$ref" in found:
            section = sections[found["$ref"].rpartition("/")[2]]
            _amend(section["properties"], defaults[name])
            # A section whose keys are all commented out is null to YAML.
            schema["properties"][name] = {
                "anyOf": [{"$ref": found["$ref"]}, {"type": "null"}],
                "description": section["description"],
            }
    of_nodes = sections[NodeConfig.__name__]["properties"]
    for dotted in NOT_BY_LABEL:
        name, _, key = dotted.partition(".")
        of_nodes[name].setdefault("properties", {})[key] = False
    schema.pop("title")
    draft = "https://json-schema.org/draft/2020-12/schema"
    schema = {"$schema": draft, "title": "kvray.yaml", **schema}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


@cache
def setting_rows() -> tuple[SettingRow, ...]:
    """Return every setting, in the order of the schema; those of `nodes` are one."""
    schema = json.loads(json_schema())
    return tuple(_rows(schema["properties"], schema["$defs"], ""))


def _amend(properties: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Say what pydantic does not: units of durations, and defaults as one writes them."""
    for name, found in properties.items():
        found.pop("title", None)
        if "description" in found:
            found["description"] = " ".join(found["description"].split())
        if "default" in found or found.get("type") == "object":  # pydantic leaves factories out
            found["default"] = defaults[name]
        if name.endswith("_s"):
            found["description"] += " (seconds)"
            found["examples"] = [defaults[name]]
        if "patternProperties" in found:
            found["additionalProperties"] = False


def _rows(properties: dict[str, Any], sections: dict[str, Any], at: str) -> Iterator[SettingRow]:
    for name, found in properties.items():
        reference = found.get("anyOf", [{}])[0].get("$ref", "").rpartition("/")[2]
        if reference:
            yield from _rows(sections[reference]["properties"], sections, f"{at}{name}.")
        else:
            yield SettingRow(
                name=f"{at}{name}",
                kind=_kind(found),
                default=_written(found.get("default")),
                description=found.get("description", ""),
            )


def _kind(found: dict[str, Any]) -> str:
    """Return in words what a value may be."""
    if "anyOf" in found:
        kinds = [_kind(one) for one in found["anyOf"] if one.get("type") != "null"]
        is_size = kinds[0].startswith("whole number from 1 to") and kinds[1:] == ["text"]
        return "size" if is_size else " or ".join(kinds)
    if "enum" in found:
        return ", ".join(found["enum"])
    if found.get("type") in ("integer", "number"):
        return ("whole number" if found["type"] == "integer" else "number") + _bounds(found)
    if found.get("pattern") == "^/":
        return "absolute path"
    kinds_of = {"array": "list", "object": "mapping", "string": "text"}
    return kinds_of[found["type"]]


def _bounds(found: dict[str, Any]) -> str:
    words = {
        "minimum": " from {}",
        "exclusiveMinimum": " above {}",
        "maximum": " to {}",
    }
    return "".join(text.format(f"{found[k]:g}") for k, text in words.items() if k in found)


def _written(default: Any) -> str:
    """Return a default as YAML has it; "" for none."""
    if default is None:
        return ""
    return default if isinstance(default, str) else json.dumps(default)
