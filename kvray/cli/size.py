"""`kvray size`: how much host memory is worth it, by the traffic as it is."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvray.cli.asking import open_client, parse_option, show_answer
from kvray.cli.text.sizing import missing_sentences, sizing_sentences, sizing_table, sizing_title
from kvray.console.options import AddressOption, ConfigOption, JsonOption, VerboseOption
from kvray.console.output import PlotOption, boundary, check_plot, printer, write_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLOTTED_MAX = 6
_MORE_MAX = 16


def size(
    add: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="Host memory to add, of all nodes together; may be repeated. Default: as much"
            " again as there is.",
        ),
    ] = None,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="Draw the curves here from what the nodes have sampled until now."
        ),
    ] = False,
    config: ConfigOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Say what more or less host memory would be worth to the prompts that come.

    Each node samples the prompts of its replicas, and replays the sample in small copies of its
    cache, which takes minutes for a curve. With --now this machine does it, in seconds.

    Of each namespace it shows the share of prompt tokens that would hit at each size.
    """
    with boundary(verbose=verbose) as interrupts:
        more = [parse_option("--add", text) for text in add or ()][:_MORE_MAX]
        if plot is not None:
            check_plot(plot)
        with open_client(config, address, interrupts) as client:
            found = client.sizing(now=now)
        show_answer(found, lambda found: _print(found, more), as_json=as_json)
        if plot is not None:
            write_picture(make_figure(found), plot)


def make_figure(found: dict[str, Any]) -> "Figure":
    """Return the share of hits by size of the memory, one picture for each namespace."""
    from matplotlib.figure import Figure

    entries = found["namespaces"][:_PLOTTED_MAX]
    figure = Figure(figsize=(9, 4.5 * max(1, len(entries))), layout="constrained")
    for at, entry in enumerate(entries):
        axes = figure.add_subplot(len(entries), 1, at + 1)
        sizes = [one / 2**30 for one in entry["sizes"]]
        host = [100 * (entry["own"] + one) for one in entry["host"]]
        both = [one + 100 * disk for one, disk in zip(host, entry["disk"], strict=True)]
        band = [200 * one for one in entry["error"]]
        low = [one - width for one, width in zip(both, band, strict=True)]
        high = [one + width for one, width in zip(both, band, strict=True)]
        if entry["disk_bytes"]:
            axes.plot(sizes, both, marker="o", markersize=4, label="and disk")
        axes.plot(sizes, host, marker="o", markersize=4, label="engines' pools and host memory")
        axes.fill_between(sizes, low, high, alpha=0.2, label="two standard errors")
        axes.axhline(100 * entry["own"], color="#8a8f98", linestyle=":", label="engines' pools")
        axes.axvline(entry["host_bytes"] / 2**30, color="#8a8f98", label="memory now")
        axes.set_title(sizing_title(entry), loc="left")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{one:g}" for one in sizes])
        axes.set_xlabel("host memory, GiB")
        axes.set_ylabel("prompt tokens that hit, %")
        axes.set_ylim(0, 100)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure


def _print(found: dict[str, Any], more: list[int]) -> None:
    console = printer()
    for sentence in missing_sentences(found):
        console.print(sentence, soft_wrap=True)
    for entry in found["namespaces"]:
        console.print(f"\n{sizing_title(entry)}")
        console.print(sizing_table(entry))
        for sentence in sizing_sentences(entry, more or [entry["host_bytes"]]):
            console.print(sentence, soft_wrap=True)
