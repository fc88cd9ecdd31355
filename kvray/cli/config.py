"""`kvray config` and `kvray connector-config`: values with their sources, and engine options."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvray.cli.asking import show_answer
from kvray.config import (
    effective_settings,
    json_schema,
    load_config,
    read_effective,
)
from kvray.console.options import AddressOption, ConfigOption, JsonOption, VerboseOption
from kvray.console.output import boundary, empty_table, printer
from kvray.errors import ConfigError

_NodeLabelOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Use the values that `nodes` has for nodes with this Ray label; repeatable.",
    ),
]

config_app = typer.Typer(
    name="config",
    help="Show the configuration and its schema.",
    no_args_is_help=True,
)


@config_app.command()
def show(
    config: ConfigOption = None,
    address: AddressOption = None,
    node_label: _NodeLabelOption = None,
    changed: Annotated[bool, typer.Option("--changed", help="Leave out the defaults.")] = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Print every effective value and its source.

    Without --node-label these are the tier's own values. Needs no Ray.
    """
    with boundary(verbose=verbose):
        effective = read_effective(
            config, overrides={"ray.address": address}, labels=_labels(node_label)
        )
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
        show_answer(found, _print, as_json=as_json)


@config_app.command()
def schema(verbose: VerboseOption = False) -> None:
    """Print the JSON schema of kvray.yaml, for editors and checkers."""
    with boundary(verbose=verbose):
        print(json_schema(), end="")


def _print(found: dict[str, Any]) -> None:
    console = printer()
    console.print(f"File: {found['file'] or 'none'}", soft_wrap=True)
    if not found["settings"]:
        console.print("Every setting has its default.")
        return
    table = empty_table("setting", "value", "from", folds=True)
    for one in found["settings"]:
        value, origin = one["value"], one["from"]
        written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        style = "dim" if origin["kind"] == "default" else None
        table.add_row(one["name"], written, origin["where"] or origin["kind"], style=style)
    console.print(table)


def _labels(given: list[str] | None) -> dict[str, str]:
    """Return the labels of `--node-label`, as key -> value."""
    labels = {}
    for one in given or []:
        key, parted, value = one.partition("=")
        if not (key and parted and value):
            raise ConfigError(
                f"--node-label {one!r} is no label; write key=value, such as kvray.io/pool=big."
            )
        labels[key] = value
    return labels


MODULE = "kvray.connector"
SCHEDULER_CLASS = "KvRayScheduler"
WORKER_CLASS = "KvRayWorker"

_TEMPLATE = """\
# Written by `kvray connector-config`; for `trtllm-serve MODEL --extra_llm_api_options THIS_FILE`.
kv_connector_config:
  connector_module: {module}
  # {hint}
  connector_scheduler_class: {scheduler}
  connector_worker_class: {worker}
kv_cache_config:
  # The engine reuses its own blocks first, and asks the connector for the tokens after them.
  enable_block_reuse: true
  # With partial reuse the engine asks from the middle of a block on. kvray has whole blocks and
  # must decline such a request.
  enable_partial_reuse: false
"""


def connector_config(
    config: ConfigOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The file to write; by default stdout."
        ),
    ] = None,
    verbose: VerboseOption = False,
) -> None:
    """Write the YAML file for `trtllm-serve --extra_llm_api_options`.

    Without --config the engine reads the file in KVRAY_CONFIG when it starts.
    """
    with boundary(verbose=verbose):
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
    """Return the YAML for a replica that reads `config`, or what KVRAY_CONFIG names if None."""
    scheduler, worker = (class_name(name, config) for name in (SCHEDULER_CLASS, WORKER_CLASS))
    return _TEMPLATE.format(
        module=MODULE,
        scheduler=json.dumps(scheduler, ensure_ascii=False),  # a YAML string too
        worker=json.dumps(worker, ensure_ascii=False),
        hint="After the @: the configuration that the engine reads."
        if config
        else "The engine reads the configuration that KVRAY_CONFIG names when it starts.",
    )


def class_name(name: str, config: Path | None) -> str:
    """Return the class's name, with the configuration that it reads."""
    return name if config is None else f"{name}@{config.absolute()}"
