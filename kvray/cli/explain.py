"""`kvray explain`: why a request hit or missed, and what became of the blocks of a prompt."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvray.cli.boundary import boundary, stdout_kept
from kvray.cli.explanation import (
    prompt_report,
    request_report,
    requests_sentence,
    requests_table,
)
from kvray.cli.options import AddressOption, ConfigOption, VerboseOption
from kvray.cli.token_file import read_tokens
from kvray.config import load_config
from kvray.errors import ConfigError

_LAST_MAX = 200

EPILOG = """Examples:

kvray explain --last: the latest request of any replica.

kvray explain --last 20 --replica replica-0: its latest 20, one line each, and why most was missed.

kvray explain 4711: the request that the engine calls 4711.

kvray explain --tokens prompt.json: what is stored of a prompt now, and what became of the rest.

Exit status: 0 if there is an answer, whatever it is; 2 if nothing is known, no tier runs or an
option is wrong; 130 if it was interrupted."""


def explain(
    request_id: Annotated[
        int | None,
        typer.Argument(
            metavar="REQUEST_ID|N",
            help="The engine's number of the request; with --last, how many requests.",
            show_default=False,
        ),
    ] = None,
    last: Annotated[
        bool, typer.Option("--last", help="The latest requests: N of them, or 1.")
    ] = False,
    replica: Annotated[
        str | None,
        typer.Option(help="The replica, as `kvray status` names it; else any.", show_default=False),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A prompt instead of a request: its token ids, as one JSON list or apart by white"
            " space; - is stdin.",
            show_default=False,
        ),
    ] = None,
    salt: Annotated[
        str | None, typer.Option(help="With --tokens: the cache salt.", show_default=False)
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(
            help="With --tokens: path of the LoRA adapter on the nodes.", show_default=False
        ),
    ] = None,
    config: ConfigOption = None,
    address: AddressOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verbose: VerboseOption = False,
) -> None:
    """Say why a request hit or missed, block range by block range, and what to do about it."""
    with boundary(verbose=verbose) as interrupts:
        _check(request_id, last=last, has_tokens=tokens is not None, salt=salt, lora=lora)
        settings = load_config(config, overrides={"ray.address": address})
        token_ids = None if tokens is None else read_tokens(tokens)
        with interrupts.masked():
            from kvray.client import Client

        with stdout_kept(), Client(settings) as client:
            if token_ids is not None:
                found = client.explain_tokens(token_ids, replica=replica, salt=salt, lora=lora)
            elif last or request_id is None:
                found = client.explain(replica=replica, last=request_id or 1)
            else:
                found = client.explain(request_id, replica=replica, last=_LAST_MAX)
        if as_json:
            print(json.dumps(found, indent=2))
        else:
            _print(found, as_list=last and (request_id or 1) > 1)


def _check(
    request_id: int | None, *, last: bool, has_tokens: bool, salt: str | None, lora: str | None
) -> None:
    """Refuse what does not belong together."""
    if has_tokens and (last or request_id is not None):
        raise ConfigError("Give --tokens, or a request; not both.")
    if not has_tokens and (salt is not None or lora is not None):
        raise ConfigError("--salt and --lora go with --tokens; a request has its own.")
    if last and request_id is not None and not 1 <= request_id <= _LAST_MAX:
        raise ConfigError(f"--last takes a number from 1 to {_LAST_MAX}, not {request_id}.")


def _print(found: dict[str, Any], *, as_list: bool) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    now = time.time()
    requests = found.get("requests", [])
    if as_list:
        console.print(requests_table(requests, now=now))
        console.print(requests_sentence(requests), soft_wrap=True)
    else:
        reports = [request_report(one, now=now) for one in requests]
        reports += [prompt_report(one, now=now) for one in found.get("prompts", [])]
        for number, report in enumerate(reports):
            if number:
                console.print()
            for line in report:
                console.print(line, soft_wrap=isinstance(line, str))
    if found["silent"]:
        console.print(f"No answer from {', '.join(found['silent'])}: it may know more.")
