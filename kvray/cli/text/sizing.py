"""What memory would be worth, in sentences; the same in every command."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from kvray.actors.tier.sizing import WORTH_SHARE, found_with
from kvray.cli.text.explanation import shortened
from kvray.config import format_size
from kvray.console.output import empty_table

_MODEL_MAX = 40
_TOO_LITTLE = (
    "Too little traffic so far to say what memory is worth: there is no namespace of which the"
    " sample has enough blocks, or no curve is done yet."
)


def sizing_sentences(
    entry: Mapping[str, Any], more_bytes: Sequence[int], *, is_short: bool = False
) -> list[str]:
    """Return what a namespace's prompts find now, and what they would find with more memory.

    The short form is one sentence, on the first of `more_bytes`.
    """
    now = found_with(entry, entry["host_bytes"])
    assert now is not None, "the present size is a point of every curve"
    hits, sentences = entry["own"] + now["host"] + now["disk"], []
    for more in more_bytes:
        then = found_with(entry, entry["host_bytes"] + more)
        if then is None:
            sentences.append(
                f"The curve ends at {format_size(entry['sizes'][-1])}: what"
                f" {format_size(more)} more would bring it does not say."
            )
            continue
        would = entry["own"] + then["host"] + then["disk"]
        sentences.append(
            f"With +{format_size(more)} of host memory {_share(would)} of prompt tokens would hit"
            f" instead of {_share(hits)}, each give or take {_points(2 * then['error'])}."
        )
    if is_short:
        return sentences[:1]
    sentences.insert(
        0,
        f"At today's {format_size(entry['host_bytes'])} of host memory {_share(hits)} of prompt"
        f" tokens hit: {_share(entry['own'])} are in the engines' own pools, {_share(now['host'])}"
        " in host memory" + (f", {_share(now['disk'])} on disk." if entry["disk_bytes"] else "."),
    )
    if entry["disk_bytes"]:
        sentences.append(f"The disk gives {_points(now['disk'])}.")
    return [*sentences, _worth(entry), *_fits(entry)]


def sizing_title(entry: Mapping[str, Any]) -> str:
    """Return a namespace's name, and its model's."""
    model = shortened(str(entry["model"]), _MODEL_MAX)
    return f"{entry['namespace']} ({model})" if model else str(entry["namespace"])


def sizing_line(found: Mapping[str, Any]) -> str:
    """Return the sentence of `kvray status`: twice the memory, for the busiest namespace."""
    if not found["namespaces"]:
        return _TOO_LITTLE
    entry = found["namespaces"][0]
    (line,) = sizing_sentences(entry, [entry["host_bytes"]], is_short=True)
    others = ", and for other namespaces" if len(found["namespaces"]) > 1 else ""
    return f"{line} `kvray size` says it for other sizes{others}."


def missing_sentences(found: Mapping[str, Any]) -> list[str]:
    """Return what the curves do not have."""
    if not found["namespaces"]:
        return [_TOO_LITTLE]
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
    numbers = ("memory", "hit", "host", "disk", "give or take")
    table = empty_table(numbers=numbers if entry["disk_bytes"] else numbers[:3] + numbers[4:])
    rows = zip(entry["sizes"], entry["host"], entry["disk"], entry["error"], strict=True)
    for size, host, disk, error in rows:
        found = [_share(entry["own"] + host + disk), _share(host), _share(disk)]
        cells = [format_size(size), *found[: 3 if entry["disk_bytes"] else 2], _points(2 * error)]
        is_now = size == entry["host_bytes"]
        table.add_row(*cells, style="bold" if is_now else None)
    return table


def _worth(entry: Mapping[str, Any]) -> str:
    least = entry["worth_from_bytes"]
    if least is None:
        return (
            f"No size up to {format_size(entry['sizes'][-1])} is worth running: less than"
            f" {_points(WORTH_SHARE)} of the prompt tokens would come from host memory."
        )
    if least == 0:
        return f"Even {format_size(entry['sizes'][0])} are worth running."
    return f"Below {format_size(least)} it is not worth running."


def _fits(entry: Mapping[str, Any]) -> list[str]:
    if entry["distinct_bytes"] > entry["host_bytes"]:
        return []
    return [
        f"All blocks of the sampled prompts, of {_time(entry['seconds'])}, fit into"
        f" {format_size(entry['distinct_bytes'])}: more memory brings them nothing."
    ]


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _points(value: float) -> str:
    points = max(0.1, round(100 * value, 1))
    return f"{points:g} point{'' if points == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{max(1, seconds / 60):.0f} min"
