"""`kvray config` and `kvray connector-config`: values with their sources, and engine options."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvray.cli.asking import show_answer
from kvray.config import effective_settings, json_schema, load_config, read_effective
from kvray.console.options import AddressOption, ConfigOption, JsonOption, flag, option
from kvray.console.output import empty_table
from kvray.errors import ConfigError

config_app = typer.Typer(
    name="config", help="Show the configuration and its schema.", no_args_is_help=True
)


@config_app.command()
def show(
    config: ConfigOption = None,
    address: AddressOption = None,
    node_label: Annotated[
        list[str] | None,
        option(
            "KEY=VALUE",
            "Use the values that `nodes` has for nodes with this Ray label; repeatable.",
        ),
    ] = None,
    changed: Annotated[bool, flag("--changed", "Leave out the defaults.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every effective value and its source.

    Without --node-label these are the tier's own values. Needs no Ray.
    """
    labels = {}
    for one in node_label or []:
        key, parted, value = one.partition("=")
        if not (key and parted and value):
            raise ConfigError(
                f"--node-label {one!r} is no label; write key=value, such as kvray.io/pool=big."
            )
        labels[key] = value
    overrides = {"ray.address": address}
    effective = read_effective(config, overrides=overrides, labels=labels)
    found = {
        "file": None if effective.path is None else str(effective.path),
        "settings": [
            {
                "name": one.name,
                "value": one.value,
                "from": {"kind": one.origin.kind, "where": one.origin.where or None},
            }
            for one in effective_settings(effective)
            if not (changed and one.origin.kind == "default")
        ],
    }
    show_answer(found, _report, as_json=as_json)


@config_app.command()
def schema() -> None:
    """Print the JSON schema of kvray.yaml, for editors and checkers."""
    print(json_schema(), end="")


def _report(found: dict[str, Any]) -> Iterator[Table | str]:
    yield f"File: {found['file'] or 'none'}"
    if not found["settings"]:
        yield "Every setting has its default."
        return
    table = empty_table("setting", "value", "from", folds=True)
    for one in found["settings"]:
        value, origin = one["value"], one["from"]
        written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        style = "dim" if origin["kind"] == "default" else None
        table.add_row(one["name"], written, origin["where"] or origin["kind"], style=style)
    yield table


_TEMPLATE = """\
# Written by `kvray connector-config`; for `trtllm-serve MODEL --extra_llm_api_options THIS_FILE`.
kv_connector_config:
  connector_module: kvray.connector
  # After an @: the configuration that the engine reads, which else is that in its KVRAY_CONFIG.
  connector_scheduler_class: {scheduler}
  connector_worker_class: {worker}
kv_cache_config:
  # The engine reuses its own blocks first, and asks the connector for the tokens after them.
  enable_block_reuse: true
  # With partial reuse kvray finds as much, but the engine waits after each pass until the blocks
  # that it filled were read.
  enable_partial_reuse: false
"""


def connector_config(
    config: ConfigOption = None,
    output: Annotated[
        Path | None,
        option("FILE", "The file to write.", names=["--output", "-o"], default="stdout"),
    ] = None,
) -> None:
    """Write the YAML file for `trtllm-serve --extra_llm_api_options`.

    Without --config the engine reads the file in KVRAY_CONFIG when it starts.
    """
    load_config(config)  # a mistake in it shows here and not in an engine's log
    text = render(config)
    if output is None:
        print(text, end="")
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written ({error.strerror}).") from None


def render(config: Path | None) -> str:
    """Return the YAML for a replica that reads `config`, or what KVRAY_CONFIG names if None.

    ConfigError: the path is not UTF-8, which YAML must be.
    """
    where = "" if config is None else f"@{config.absolute()}"
    if where.encode(errors="ignore").decode() != where:
        raise ConfigError(
            f"{where[1:]!r} cannot be written into YAML; move the file to a path of UTF-8 text,"
            " or name it in the engine's KVRAY_CONFIG."
        )
    return _TEMPLATE.format(
        scheduler=json.dumps(f"KvRayScheduler{where}", ensure_ascii=False),  # a YAML string too
        worker=json.dumps(f"KvRayWorker{where}", ensure_ascii=False),
    )
