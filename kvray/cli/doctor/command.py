"""`kvray doctor`: runs the checks and prints each fault and hint with its fix."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from kvray.cli.asking import for_people, show_answer
from kvray.cli.doctor.tier import Finding, fault, hit_findings, ok, tier_findings
from kvray.cli.transports import NodeLink, node_links, node_links_table
from kvray.config import KVRayConfig, load_config
from kvray.console.interrupts import masked
from kvray.console.options import AddressOption, ConfigOption, JsonOption, flag
from kvray.console.output import EXIT_ERROR, printer, stdout_kept
from kvray.errors import KVRayError

_COLOURS = {"ok": "green", "hint": "yellow", "fault": "red", "skipped": "dim"}


def doctor(
    config: ConfigOption = None,
    address: AddressOption = None,
    here: Annotated[
        bool, flag("--here", "Only this machine or container, as an engine sees it. Asks no Ray.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find faults of the tier, and say how to mend them.

    Run it where Ray runs, and with --here in an engine's container. It joins the arena for a
    moment, as an engine does, and changes nothing.
    """
    settings = load_config(config, overrides={"ray.address": address})
    with masked():
        from kvray.cli.doctor.node import arena_findings, machine_findings, why_not_here
    with printer().status("Looking at this machine") if not as_json else stdout_kept():
        findings = list(machine_findings(settings))
    found: dict[str, Any] | None = None
    elsewhere: Finding | None = None
    if not here:
        found, node_id, asked = _ask_tier(settings)
        findings += asked
        if found is not None:
            elsewhere = why_not_here(found["shards"], node_id, settings.node_dir)
    findings += arena_findings(settings) if elsewhere is None else [elsewhere]
    links = [] if found is None else node_links(found)
    told = {
        "hosts": {} if found is None else found["hosts"],
        "findings": [one._asdict() for one in findings],
        "transports": [one._asdict() for one in links],
    }
    shown = [] if found is None else node_links(for_people(found))
    show_answer(told, lambda _: _report(findings, shown), as_json=as_json)
    if any(finding.verdict == "fault" for finding in findings):
        raise typer.Exit(EXIT_ERROR)


def _ask_tier(settings: KVRayConfig) -> tuple[dict[str, Any] | None, str, list[Finding]]:
    """Return the tier's status or None, this node's id, and the findings about the tier."""
    with masked():
        import ray

        from kvray.client import Client
    try:
        with stdout_kept(), Client(settings) as client:
            node_id = ray.get_runtime_context().get_node_id()
            found = client.status()
    except KVRayError as error:
        what, _, fix = str(error).rstrip(".").rpartition("; ")
        if not what:
            what, fix = fix, "start the tier with `kvray up`"
        return None, "", [fault("Ray", what, fix)]
    told = for_people(found)
    return found, node_id, [ok("Ray", "answers"), *tier_findings(told), *hit_findings(told)]


def _report(findings: list[Finding], links: list[NodeLink]) -> Iterator[Table | str]:
    table = Table(box=box.SIMPLE, collapse_padding=True, show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, style=_COLOURS[finding.verdict])
        table.add_row(verdict, finding.check, finding.says)
    yield table
    if links:
        yield node_links_table(links)
    unfixed = [one for kind in ("fault", "hint") for one in findings if one.verdict == kind]
    for one in unfixed:
        yield f"{one.verdict} ({one.check}): {one.says}; {one.fix}."
    if not unfixed:
        yield "Nothing is wrong."
