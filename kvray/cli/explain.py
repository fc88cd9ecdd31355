"""`kvray explain`: why a request hit or missed, and what became of the blocks of a prompt."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvray.cli.asking import open_client, read_tokens, show_answer
from kvray.cli.text.explanation import (
    prompt_report,
    request_report,
    requests_sentence,
    requests_table,
)
from kvray.console.options import AddressOption, ConfigOption, JsonOption, VerboseOption
from kvray.console.output import boundary, printer
from kvray.errors import ConfigError

_LAST_MAX = 200


def explain(
    request_id: Annotated[
        int | None,
        typer.Argument(
            min=0,
            max=2**64 - 1,
            metavar="REQUEST_ID|N",
            help="The engine's number of the request; with --last, how many requests.",
        ),
    ] = None,
    last: Annotated[
        bool, typer.Option("--last", help="Explain the latest request, or the latest N.")
    ] = False,
    replica: Annotated[
        str | None,
        typer.Option(help="Only this replica, named as in `kvray status`."),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Explain a prompt: its token ids, as a JSON list or separated by white space;"
            " - is stdin.",
        ),
    ] = None,
    salt: Annotated[
        str | None, typer.Option(help="With --tokens: the prompt's cache salt.")
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(help="With --tokens: the path of its LoRA adapter on the nodes."),
    ] = None,
    config: ConfigOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Explain why a request hit or missed, range by range, and what to do about it."""
    with boundary(verbose=verbose) as interrupts:
        if tokens is not None and (last or request_id is not None):
            raise ConfigError("Give either --tokens or a request, not both.")
        if tokens is None and (salt is not None or lora is not None):
            raise ConfigError("--salt and --lora need --tokens; a request has its own.")
        if last and request_id is not None and not 1 <= request_id <= _LAST_MAX:
            raise ConfigError(f"--last takes a number from 1 to {_LAST_MAX}, not {request_id}.")
        token_ids = None if tokens is None else read_tokens(tokens)
        with open_client(config, address, interrupts) as client:
            if token_ids is not None:
                found = client.explain_tokens(token_ids, replica=replica, salt=salt, lora=lora)
            elif last or request_id is None:
                found = client.explain(replica=replica, last=request_id or 1)
            else:
                found = client.explain(request_id, replica=replica, last=_LAST_MAX)
        as_list = last and (request_id or 1) > 1
        show_answer(found, lambda found: _print(found, as_list=as_list), as_json=as_json)


def _print(found: dict[str, Any], *, as_list: bool) -> None:
    console = printer()
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
        console.print(f"No answer from {', '.join(found['silent'])}, which may know more.")
