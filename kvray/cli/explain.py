"""`kvray explain`: why a request hit or missed, what became of a prompt's blocks, and advice."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import RenderableType
from rich.table import Table

from kvray.actors.hosts import node_meant
from kvray.actors.names import node_of
from kvray.cli.asking import open_client, read_tokens, show_answer
from kvray.console.options import (
    AddressOption,
    ConfigOption,
    JsonOption,
    flag,
    option,
)
from kvray.console.output import empty_table
from kvray.errors import ConfigError

_LAST_MAX = 200
_DIGITS_MAX = 20  # of 64 bits


def explain(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="REQUEST_ID|N",
            help="The engine's number of the request, or its x-request-id where the engine's"
            " server keeps that; with --last, how many requests.",
        ),
    ] = None,
    last: Annotated[bool, flag("--last", "Explain the latest request, or the latest N.")] = False,
    replica: Annotated[
        str | None, typer.Option(help="Only this replica, named as in `kvray ls`.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="Only requests of this node: a host name, an IP or an id.")
    ] = None,
    tokens: Annotated[
        Path | None,
        option(
            "FILE",
            "Explain a prompt: its token ids, as a JSON list or separated by white space; - is"
            " stdin.",
        ),
    ] = None,
    salt: Annotated[
        str | None, typer.Option(help="With --tokens: the prompt's cache salt.")
    ] = None,
    lora: Annotated[
        str | None, typer.Option(help="With --tokens: the path of its LoRA adapter on the nodes.")
    ] = None,
    config: ConfigOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain why a request hit or missed, range by range, and what to do about it."""
    if tokens is not None and (last or request is not None or node is not None):
        raise ConfigError("Give either --tokens or a request, with or without --node, not both.")
    if tokens is None and (salt is not None or lora is not None):
        raise ConfigError("--salt and --lora need --tokens; a request has its own.")
    is_number = request is not None and request.isdecimal() and len(request) <= _DIGITS_MAX
    asked = int(request) if request is not None and is_number else request
    num_last = asked if last and asked is not None else 1
    if not isinstance(num_last, int) or not 1 <= num_last <= _LAST_MAX:
        raise ConfigError(f"--last takes a number from 1 to {_LAST_MAX}, not {request:.80}.")
    token_ids = None if tokens is None else read_tokens(tokens)
    with open_client(config, address) as client:
        hosts = client.hosts()
        home = None if node is None else node_meant(node, hosts)
        if token_ids is not None:
            found = client.explain_tokens(token_ids, replica=replica, salt=salt, lora=lora)
        else:
            which = None if last else asked
            count = num_last if which is None else _LAST_MAX
            found = client.explain(which, replica=replica, last=_LAST_MAX if home else count)
            those = [one for one in found["requests"] if home in (None, node_of(one["node"]))]
            if home is not None and not those:
                raise ConfigError(f"No such request of node {node!r:.80} is known.")
            found["requests"] = those[:count]
    found["hosts"] = hosts
    as_list = last and num_last > 1
    show_answer(found, lambda found: _report(found, as_list=as_list), as_json=as_json)


def _report(found: dict[str, Any], *, as_list: bool) -> Iterator[RenderableType]:
    now, requests = time.time(), found.get("requests", [])
    if as_list:
        yield requests_table(requests, now=now)
        yield requests_sentence(requests)
    else:
        reports = [request_report(one, now=now) for one in requests]
        reports += [prompt_report(one, now=now) for one in found.get("prompts", [])]
        for number, report in enumerate(reports):
            if number:
                yield ""
            yield from report
    if found["silent"]:
        yield f"No answer from {', '.join(found['silent'])}, which may know more."


_MORE_ROOM = (
    "Raise arena.capacity, or give the tier a disk (nvme.dir), which keeps most with"
    " nvme.admission: all; `kvray replay` shows what more memory would gain."
)
WAYS = {
    "host": "in the node's memory already",
    "nvme": "brought from the node's disk",
    "nixl": "brought over NIXL",
    "object_ref": "brought through Ray's object store",
}
_TIERS = {"host": "the memory", "nvme": "the disk"}
_PLACES = {"host": "in the memory", "nvme": "on the disk"}
_RANGE_COLUMNS = ("tokens", "what", "how, or why not")
_DAY_S = 86_400


class Reason(NamedTuple):
    """The end of "missed because ...", and what to do, as a sentence; empty if nothing."""

    means: str
    advice: str


REASONS: dict[str, Reason] = {
    "none": Reason("nothing was missed", ""),
    "never_stored": Reason(
        "no replica of this namespace has stored these blocks, as far as the nodes here remember",
        "Nothing is wrong if the text is new, or a node with the blocks is gone. If it was sent"
        " before, see in `kvray status --wide` whether namespaces differ, and compare salts,"
        " adapters and token ids of both prompts: after the first token that differs (a date, a"
        " name), nothing can match.",
    ),
    "evicted": Reason("they were stored, and had left the tier", ""),
    "partial": Reason(
        "some ranks' parts of these blocks are stored, and others are not",
        "A rank could not save, or its node is gone: see `dropped` and gone ranks in `kvray status"
        " --wide`.",
    ),
    "not_stored": Reason(
        "no node had these blocks", "Run `kvray explain` to see what became of them."
    ),
    "corrupt": Reason(
        "a block failed its checksum and was not used",
        "Run `kvray verify`; if it finds more, look at the memory and the disk of that node.",
    ),
    "arena_busy": Reason(
        "another process held the lock of the node's memory for longer than arena.lock_wait_s",
        "If it happens often, look for processes that are starved of CPU, or raise"
        " arena.lock_wait_s.",
    ),
    "too_slow": Reason(
        "the blocks were on other nodes or on disk, and did not arrive within"
        " connector.stage_wait_s",
        "Mend links first from which `kvray status` says that no block comes. Else the next request"
        " finds what was late; use Client.prefetch in the router, or raise connector.stage_wait_s.",
    ),
    "hold_full": Reason(
        "vLLM's ranks had no memory to hold the blocks in, for as long as computing takes",
        "Raise connector.hold: hits of long prompts, or of many at once, need more of it.",
    ),
    "cheaper_to_recompute": Reason(
        "fetching the blocks would have taken longer than computing them",
        "If the network should be faster, run `kvray doctor`.",
    ),
    "store_down": Reason(
        "the node's shard, or the lookup, did not answer, or there is no tier on the node",
        "See `kvray status`, and `kvray doctor` on the engine's node.",
    ),
    "unaligned": Reason(
        "the engine had part of a block itself, whose page kvray may not write",
        "Set kv_cache_config.enable_partial_reuse: false.",
    ),
    "fingerprinting": Reason(
        "the engine had not read its checkpoint, which its namespace depends on",
        "Wait, unless `kvray status` or the engine's log says that it cannot be read. To use the"
        " tier at once, name model and revision in connector.model_key.",
    ),
    "weights_unnamed": Reason(
        "the engine's weights were replaced, or may be, and nobody has named their version",
        "Call Client.set_weights_version once the new weights are loaded, or set"
        " connector.weights_version for those that the engine starts with.",
    ),
    "reuse_disabled": Reason(
        "block reuse is off in the engine: kv_cache_config.enable_block_reuse is false",
        "Set kv_cache_config.enable_block_reuse: true.",
    ),
    "skipped": Reason(
        "the request reads no prefix cache, as one that wants logprobs of its prompt",
        "Ask for no logprobs of a prompt where a hit is worth more.",
    ),
    "bypassed": Reason(
        "the request has no keys: it names no tenant, or an adapter or item without an identity",
        "The engine's log has each reason once, behind `a request goes without the tier`.",
    ),
}

CAUSES = {
    "writer": Reason("a writer of that node, because the memory was full", _MORE_ROOM),
    "ahead": Reason("the shard, to keep arena.free_target free", _MORE_ROOM),
    "quota": Reason(
        "the shard, because the namespace or tenant was over its quota",
        "Raise its quota (arena.namespace_quota, arena.quotas, security.tenant_quota,"
        " security.tenant_quotas).",
    ),
    "given_up": Reason(
        "the shard, because other parts of the block were gone",
        "Look at the node that had them: `kvray status`.",
    ),
    "cleared": Reason("a user who cleared the tier", "It fills again by itself."),
    "corrupt": Reason(
        "a reader, because the block failed its checksum",
        "Run `kvray verify`; if it finds more, look at the memory and the disk of that node.",
    ),
    "disk_room": Reason("the shard, to make room on its disk", "Raise nvme.capacity."),
}
"""Who evicted a block, and why."""


def reason(name: str, cause: str = "") -> Reason:
    """Return the words for a reason, else its name; of evicted blocks with a `cause`'s advice."""
    known = REASONS.get(name) or Reason(name.replace("_", " "), "")
    return known._replace(advice=CAUSES[cause].advice) if cause in CAUSES else known


def request_report(request: Mapping[str, Any], *, now: float) -> Iterator[RenderableType]:
    """Yield the lines on one request; the last one is a sentence that sums it up."""
    rank = f", rank {request['rank']}" if request["rank"] else ""
    name = f" ({request['name']})" if request["name"] else ""
    yield (
        f"Request {request['request_id']}{name} of replica"
        f" {request['replica']}{rank}, {clock(request['at'], now)}:"
        f" {request['num_tokens']:,} prompt tokens, namespace {request['namespace'] or 'not known'}"
    )
    table = empty_table(*_RANGE_COLUMNS, folds=True)
    about = "about " if request["is_sampled"] else ""
    for one in request["ranges"]:
        what, text = one["what"], ""
        if what == "own":
            what, text = "own pool", "the engine had these itself"
        elif what == "hit":
            text = WAYS.get(one["way"], f"brought by {one['way']}")
            text += f" from node {node_of(one['source'])}" if one["source"] else ""
        elif what == "computed":
            text = "the last token, and tokens that fill no block, are always computed"
        else:
            text = f"{about}{_missed(one, request['log_since'], now)}"
        table.add_row(_extent(one), what, text)
    yield table
    yield (
        f"The request waited {1000 * request['stage_s']:.1f} ms for the shard; the rest took"
        f" {1000 * request['lease_s']:.1f} ms."
    )
    yield from _leaving(request["leaving"])
    yield request_sentence(request, now=now)


def request_sentence(request: Mapping[str, Any], *, now: float) -> str:
    """Return the outcome of a request, its reason and what to do, in a sentence."""
    total, hit, own = (request[name] for name in ("num_tokens", "hit_tokens", "own_tokens"))
    parts = [f"{hit:,} of {total:,} tokens were hits{_sources(request)}"]
    if own:
        parts.append(f"{own:,} were in the engine's own pool")
    if not request["missed_tokens"]:
        return _ended(
            "; ".join((*parts, _nothing(request["reason"]))), reason(request["reason"]).advice
        )
    known = reason(request["reason"], _cause(request))
    reasons = {one["reason"] for one in request["ranges"] if one["what"] == "miss"}
    most = ", most of them" if len(reasons) > 1 else ""
    parts.append(f"{request['missed_tokens']:,} were missed{most} because {known.means}")
    return _ended("; ".join(parts), known.advice)


def prompt_report(prompt: Mapping[str, Any], *, now: float) -> Iterator[RenderableType]:
    """Yield the lines on what one namespace has of a prompt."""
    yield (
        f"{prompt['num_tokens']:,} prompt tokens as replica {prompt['replica']} keys"
        f" them, namespace {prompt['namespace']}"
    )
    table = empty_table(*_RANGE_COLUMNS, folds=True)
    for one in prompt["ranges"]:
        if one["what"] == "stored":
            text = _places(one["places"])
        elif one["what"] == "computed":
            text = "these fill no block, and only whole blocks are stored"
        elif one["what"] == "never_stored":
            text = f"at least not since {clock(prompt['log_since'], now)}"
        else:
            text = _left(one, now) if "left_at" in one else ""
            text += f" some parts {_places(one['places'])}" if one["places"] else ""
        table.add_row(_extent(one), one["what"].replace("_", " "), text)
    yield table
    yield from _leaving(prompt["leaving"])
    stored, total = prompt["stored_tokens"], prompt["num_tokens"]
    known = reason(prompt["reason"], _cause(prompt))
    first = f"{stored:,} of {total:,} tokens are stored now, from the first on"
    if prompt["reason"] == "none":
        yield f"{first}; the rest fills no block, and only whole blocks are stored."
    else:
        yield _ended(f"{first}; the rest is not: {known.means}", known.advice)


def requests_table(requests: Sequence[Mapping[str, Any]], *, now: float) -> Table:
    """Return one row for each request."""
    table = empty_table(
        "request", "replica", "when", "prompt", "own", "hit", "missed", "why", folds=True
    )
    for one in requests:
        table.add_row(
            *(str(one["request_id"]), one["replica"], clock(one["at"], now)),
            *(f"{one[f'{name}_tokens']:,}" for name in ("num", "own", "hit", "missed")),
            "" if one["reason"] == "none" else one["reason"].replace("_", " "),
        )
    return table


def requests_sentence(requests: Sequence[Mapping[str, Any]]) -> str:
    """Return how much of some requests hit, and the main reason for the rest."""
    total = sum(one["num_tokens"] for one in requests)
    hit = sum(one["hit_tokens"] for one in requests)
    missed: Counter[str] = Counter()
    for one in requests:
        missed[one["reason"]] += one["missed_tokens"]
    worst = max(missed, key=lambda name: (missed[name], name != "none"))
    start = f"{hit:,} of {total:,} tokens of these {len(requests)} requests were hits"
    if not missed[worst]:
        return _ended(f"{start}; {_nothing(worst)}", reason(worst).advice)
    cause = next((_cause(one) for one in requests if one["reason"] == worst), "")
    known = reason(worst, cause)
    return _ended(f"{start}; most misses were because {known.means}", known.advice)


def _nothing(name: str) -> str:
    """Return the words for requests of which nothing was missed, or nothing looked up."""
    return f"nothing was {'missed' if name == 'none' else f'looked up: {reason(name).means}'}"


def clock(at: float, now: float) -> str:
    """Return a moment for people: the time of day, and the date if it is long ago."""
    if not at:
        return "never"
    form = "%H:%M:%S" if now - at < _DAY_S else "%Y-%m-%d %H:%M:%S"
    return f"{time.strftime(form, time.localtime(at))} ({age_text(now - at)} ago)"


def age_text(seconds: float) -> str:
    """Return "3 d" and the like, rounded, in the largest unit that fits."""
    for size, unit in ((_DAY_S, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def shortened(value: str, most: int = 40) -> str:
    """Return `value`, or what fits of it into `most` characters."""
    return value if len(value) <= most else value[: most - 3] + "..."


def _missed(one: Mapping[str, Any], since: float, now: float) -> str:
    if "left_at" in one and one["reason"] in ("evicted", "partial"):
        return f"{one['reason']}: {_left(one, now)}"
    text: str = one["reason"].replace("_", " ")
    if one["reason"] == "never_stored":
        text += f", at least not since {clock(since, now)}"
        if one["places"]:
            text += f"; stored after that, or unknown to this node then, {_places(one['places'])}"
    elif one["places"]:
        text += f"; now {_places(one['places'])}"
    return text


def _left(one: Mapping[str, Any], now: float) -> str:
    first, last = one["left_at"]
    when = clock(last, now)
    if last - first >= 1:
        when = f"{clock(first, now)} to {when}"
    tier, cause = _TIERS[one["left_tier"]], CAUSES[one["left_by"]].means
    return f"left {tier} of node {node_of(one['left_node'])} at {when}, by {cause}"


def _cause(told: Mapping[str, Any]) -> str:
    """Return the cause that evicted most tokens; empty if none was evicted."""
    found: Counter[str] = Counter()
    for one in told["ranges"]:
        if told["reason"] == one.get("reason", one["what"]) and "left_by" in one:
            found[one["left_by"]] += one["stop"] - one["start"]
    return max(found, key=found.__getitem__, default="")


def _places(places: Sequence[Mapping[str, str]]) -> str:
    return ", ".join(f"{_PLACES[one['tier']]} of node {node_of(one['node'])}" for one in places)


def _sources(request: Mapping[str, Any]) -> str:
    found: Counter[str] = Counter()
    for one in request["ranges"]:
        if one["what"] == "hit":
            found[WAYS.get(one["way"], one["way"])] += one["stop"] - one["start"]
    if not found:
        return ""
    if len(found) == 1:
        return f" ({next(iter(found))})"
    return f" ({', '.join(f'{count:,} {text}' for text, count in found.items())})"


def _leaving(shards: Sequence[str]) -> Iterator[str]:
    for one in shards:
        yield (
            f"Node {node_of(one)} is being drained; blocks that only it holds go to others."
            " `kvray status` says how far it is."
        )


def _extent(one: Mapping[str, Any]) -> str:
    return f"{one['start']:,} - {one['stop']:,}"


def _ended(sentence: str, advice: str) -> str:
    return f"{sentence}.{' ' + advice if advice else ''}"
