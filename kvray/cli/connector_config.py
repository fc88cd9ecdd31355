"""`kvray connector-config`: write the options that make TensorRT-LLM use kvray."""

import json
from pathlib import Path
from typing import Annotated

import typer

from kvray.config import load_config
from kvray.console.options import ConfigOption, VerboseOption
from kvray.console.output import boundary
from kvray.errors import ConfigError

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
