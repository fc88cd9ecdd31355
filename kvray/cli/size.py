"""`kvray size`: how much host memory is worth it, by the traffic as it is."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from kvray.actors.tier.sizing import WORTH_SHARE, found_with
from kvray.cli.asking import open_client, parse_option, show_answer
from kvray.cli.ls import model_text
from kvray.config import format_size
from kvray.console.options import (
    AddressOption,
    ConfigOption,
    JsonOption,
    flag,
    option,
)
from kvray.console.output import (
    PlotOption,
    blank_figure,
    check_plot,
    empty_table,
    write_picture,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLOTTED_MAX = 6
_MORE_MAX = 16


def size(
    add: Annotated[
        list[str] | None,
        option(
            "SIZE",
            "Host memory to add, of all nodes together; may be repeated.",
            default="as much again as there is",
        ),
    ] = None,
    now: Annotated[
        bool, flag("--now", "Draw the curves here from what the nodes have sampled until now.")
    ] = False,
    config: ConfigOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Say what more or less host memory would be worth to the prompts that come.

    Each node samples the prompts of its replicas, and replays the sample in small copies of its
    cache, which takes minutes for a curve. With --now this machine does it, in seconds.

    Of each namespace it shows the share of prompt tokens that would hit at each size.
    """
    more = [parse_option("--add", text) for text in add or ()][:_MORE_MAX]
    if plot is not None:
        check_plot(plot)
    with open_client(config, address) as client:
        found = client.sizing(now=now)
    show_answer(found, lambda found: _report(found, more), as_json=as_json)
    if plot is not None:
        write_picture(make_figure(found), plot)


def make_figure(found: dict[str, Any]) -> "Figure":
    """Return the share of hits by size of the memory, one picture for each namespace."""
    entries = sure_of(found)[:_PLOTTED_MAX]
    rows = max(1, len(entries))
    figure, panels = blank_figure(9, 4.5 * rows, rows=rows)
    for axes in panels[len(entries) :]:
        axes.remove()
    for axes, entry in zip(panels, entries, strict=False):
        sizes = [one / 2**30 for one in entry["sizes"]]
        host = [100 * (entry["own"] + one) for one in entry["host"]]
        rest = zip(host, entry["disk"], entry["remote"], strict=True)
        both = [one + 100 * (disk + remote) for one, disk, remote in rest]
        band = [200 * one for one in entry["error"]]
        low = [one - width for one, width in zip(both, band, strict=True)]
        high = [one + width for one, width in zip(both, band, strict=True)]
        if both != host:
            axes.plot(sizes, both, marker="o", markersize=4, label="and disk and other nodes")
        axes.plot(sizes, host, marker="o", markersize=4, label="engines' pools and host memory")
        axes.fill_between(sizes, low, high, alpha=0.2, label="give or take")
        axes.axhline(100 * entry["own"], color="#8a8f98", linestyle=":", label="engines' pools")
        axes.axvline(entry["host_bytes"] / 2**30, color="#8a8f98", label="memory now")
        axes.set_title(sizing_title(entry), loc="left")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{one:g}" for one in sizes])
        axes.set_xlabel("host memory, GiB")
        axes.set_ylabel("prompt tokens that hit, %")
        axes.set_ylim(0, 100)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False)
    return figure


def _report(found: dict[str, Any], more: Sequence[int]) -> Iterator[Table | str]:
    yield from missing_sentences(found)
    for entry in found["namespaces"]:
        yield f"\n{sizing_title(entry)}"
        if entry["is_sure"]:
            yield sizing_table(entry)
            yield from sizing_sentences(entry, more or [entry["host_bytes"]])
        else:
            yield TOO_LITTLE


TOO_LITTLE = "Not enough traffic yet to say what memory is worth."


def sure_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the namespaces whose curves say of today's memory what was counted."""
    return [one for one in found["namespaces"] if one["is_sure"]]


def sizing_sentences(entry: Mapping[str, Any], more_bytes: Sequence[int]) -> list[str]:
    """Return what prompts find now, counted and predicted, and would find with more memory."""
    now = found_with(entry, entry["host_bytes"])
    assert now is not None, "the present size is a point of every curve"
    parts = {"the engines' own pools": entry["own"], "host memory": now["host"]}
    parts |= {"disk": now["disk"]} if entry["disk_bytes"] else {}
    parts |= {"other nodes": now["remote"]} if now["remote"] else {}
    sentences = [
        f"Of the prompt tokens of {_time(entry['seconds'])} {_share(entry['measured'])} hit;"
        f" predicted for today's {format_size(entry['host_bytes'])} of host memory is"
        f" {_share(entry['predicted'])}:"
        f" {', '.join(f'{_share(share)} from {name}' for name, share in parts.items())}.",
        *(_more(entry, more) for more in more_bytes),
    ]
    if entry["disk_bytes"]:
        sentences.append(f"The disk gives {round(100 * now['disk'], 1):g} points.")
    least, sizes = entry["worth_from_bytes"], entry["sizes"]
    if least is None:
        sentences.append(
            f"No size up to {format_size(sizes[-1])} is worth running: less than"
            f" {_points(WORTH_SHARE)} of the prompt tokens would come from host memory."
        )
    elif least == 0:
        sentences.append(f"As little as {format_size(sizes[0])} would be worth running.")
    else:
        sentences.append(f"Below {format_size(least)} it is not worth running.")
    if entry["distinct_bytes"] <= entry["host_bytes"]:
        sentences.append(
            f"All blocks of the sampled prompts fit into {format_size(entry['distinct_bytes'])}:"
            " more memory brings them nothing."
        )
    return sentences


def _more(entry: Mapping[str, Any], more: int) -> str:
    then = found_with(entry, entry["host_bytes"] + more)
    if then is None:
        return (
            f"The curve ends at {format_size(entry['sizes'][-1])}: what"
            f" {format_size(more)} more would bring it does not say."
        )
    would = entry["own"] + then["host"] + then["disk"] + then["remote"]
    return (
        f"With +{format_size(more)} of host memory {_share(would)} of prompt tokens would hit"
        f" instead of {_share(entry['predicted'])}, give or take {_points(2 * then['error'])}."
    )


def sizing_title(entry: Mapping[str, Any]) -> str:
    """Return the name of a namespace's model, and its own."""
    model = model_text(entry)
    return f"{model} ({entry['namespace']})" if model else str(entry["namespace"])


def sizing_line(found: Mapping[str, Any]) -> str:
    """Return the sentence of `kvray status`: twice the memory, for the busiest namespace."""
    if not (entries := sure_of(found)):
        return TOO_LITTLE
    line, counted = _more(entries[0], entries[0]["host_bytes"]), _share(entries[0]["measured"])
    since = _time(entries[0]["seconds"])
    return f"{line} {counted} were counted in these {since}. `kvray size` says more."


def missing_sentences(found: Mapping[str, Any]) -> list[str]:
    """Return what the curves do not have."""
    if not sure_of(found):
        return [] if found["namespaces"] else [TOO_LITTLE]
    sentences = []
    if silent := found["nodes"] - found["nodes_with_curve"]:
        sentences.append(f"{silent} of {found['nodes']} nodes have no curve yet.")
    if found["age_s"]:
        sentences.append(
            f"Curves as of {_time(found['age_s'])} ago; `kvray size --now` draws new ones."
        )
    if lost := found["lost_prompts"]:
        sentences.append(f"Prompts that came too fast to be looked at: {lost:,}.")
    return sentences


def sizing_table(entry: Mapping[str, Any]) -> Table:
    """Return one row for each size of the memory."""
    shown = [name for name in ("host", "disk", "remote") if any(entry[name])]
    table = empty_table(numbers=("memory", "hit", *shown, "give or take"))
    for at, size in enumerate(entry["sizes"]):
        found = [entry[name][at] for name in shown]
        cells = [format_size(size), *map(_share, (entry["own"] + sum(found), *found))]
        style = "bold" if size == entry["host_bytes"] else None
        table.add_row(*cells, _points(2 * entry["error"][at]), style=style)
    return table


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _points(value: float) -> str:
    points = max(0.1, round(100 * value, 1))
    return f"{points:g} point{'' if points == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{max(1, seconds / 60):.0f} min"
