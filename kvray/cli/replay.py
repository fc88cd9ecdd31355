"""`kvray replay`: its options, for policies, for routers and for a shard's curve."""

from collections.abc import Sequence
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from re import fullmatch
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvray.cli.asking import duration, parse_option
from kvray.console.interrupts import masked
from kvray.console.options import JsonOption, flag, option
from kvray.console.output import PlotOption, check_plot
from kvray.errors import ConfigError

if TYPE_CHECKING:
    from kvray.lab.report import Report

_LINK_LATENCY_S = 0.002
_MULTIPLES = {"": 1, "k": 1_000, "M": 1_000_000}
_CAPACITIES = "1k,5k,10k,30k,100k"
_POLICIES, _ADMISSIONS = ("gittins", "lru"), ("all", "twice", "likely")
_ROUTERS = ("round_robin", "pow2", "affinity", "kvray", "alone")

_FLEET = (
    *("router", "pool", "host", "speed", "deadline", "imbalance", "prefill_rate", "token_bytes"),
    *("copy_rate", "link_rate", "disk_rate", "ingresses"),
)
"""The options for routers; docs/replay.md says where their defaults are from."""


def _positive(metavar: str, text: str) -> Any:
    return option(metavar, text, 1e-6, 1e12)


Names = list[str] | None


def replay(
    ctx: typer.Context,
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Mooncake's JSON lines, or agentic sessions: a file, a directory or an archive.",
        ),
    ],
    capacity: Annotated[
        Names, option("BLOCKS", "Sizes of the host tier.", default=_CAPACITIES)
    ] = None,
    policy: Annotated[
        Names, option("NAME", "gittins or lru.", default="both", values=_POLICIES)
    ] = None,
    nvme: Annotated[str | None, option("BLOCKS", "Put an NVMe tier of this size below.")] = None,
    admission: Annotated[
        Names,
        option("NAME", "NVMe admission: all, twice or likely.", default="each", values=_ADMISSIONS),
    ] = None,
    block_tokens: Annotated[
        int | None, option("N", "Tokens of a block.", 1, 1_000_000, default="the trace's, else 512")
    ] = None,
    concurrent: Annotated[
        int,
        option("N", "Sessions at the same time, if the trace has no start times.", 1, 1_000_000),
    ] = 16,
    seed: Annotated[
        int, option("N", "Decides the order in which sessions begin.", 0, 2**32 - 1)
    ] = 0,
    check_curve: Annotated[
        bool,
        flag(
            "--check-curve",
            "Check the curve of `kvray size` on this trace, by full replays. Default policy:"
            " gittins.",
        ),
    ] = False,
    replicas: Annotated[
        int | None, option("N", "Compare routers instead, on N replicas with a node each.", 1, 512)
    ] = None,
    router: Annotated[
        Names,
        option(
            "NAME",
            "round_robin, pow2, affinity, kvray; with --ingresses, alone.",
            default="all",
            values=_ROUTERS,
        ),
    ] = None,
    pool: Annotated[str, option("BLOCKS", "Size of a replica's own pool.")] = "800",
    host: Annotated[str, option("BLOCKS", "The tier's memory of each node.")] = "3000",
    speed: Annotated[float, _positive("X", "Divide the trace's times by X: more load.")] = 1,
    deadline: Annotated[float, duration("Later first tokens are no goodput.", 1e-6, 86_400)] = 5,
    ingresses: Annotated[
        int, option("N", "Ingresses that take requests in turns, each with a router.", 1, 64)
    ] = 1,
    imbalance: Annotated[
        int, option("N", "Queues may differ by N before affinity does as pow2.", 0, 1_000_000)
    ] = 10,
    prefill_rate: Annotated[float, _positive("TOKENS/S", "Prefill of a replica.")] = 12_000,
    token_bytes: Annotated[str, option("SIZE", "KV cache of one token.")] = "160KiB",
    copy_rate: Annotated[float, _positive("GB/S", "From a node's memory to its pool.")] = 20,
    link_rate: Annotated[float, _positive("GB/S", "From node to node.")] = 10,
    disk_rate: Annotated[float, _positive("GB/S", "From disk to memory, with --nvme.")] = 3,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Replay a trace of requests, and compare how many blocks each policy would have found.

    Every policy stands beside LRU, beside Belady's optimum, which knows the future, and beside an
    infinite cache. No bytes are moved: it needs neither Ray nor a running tier.

    With --replicas it compares routers instead: what each reuses, how long first tokens take, and
    how evenly the replicas work, on the same pools and the same tier.

    With --check-curve it lets a shard sample the trace as it would sample prompts, and compares the
    curve that it draws with full replays.

    A size is a number of blocks, such as 5000, 5k or 1.5M. Names and sizes may be given
    repeatedly, or separated by commas.
    """
    given = [
        name for name in ctx.params if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")
    ]
    if check_curve and (replicas is not None or plot is not None):
        raise ConfigError("--check-curve goes with neither --replicas nor --plot.")
    refused = _FLEET if replicas is None else ("capacity", "policy", "admission")
    why = "is for policies; leave --replicas out"
    if replicas is None:
        why = "is for routers; give --replicas N, too"
    for name in refused:
        if name in given:
            raise ConfigError(f"--{name.replace('_', '-')} {why}.")
    host_blocks = parse_sizes(capacity or [_CAPACITIES], "--capacity")
    nvme_blocks = _one_size(nvme, "--nvme") if nvme is not None else 0
    if admission and not nvme_blocks:
        raise ConfigError("--admission decides what goes to disk; give --nvme BLOCKS, too.")
    if "disk_rate" in given and not nvme_blocks:
        raise ConfigError("--disk-rate is the speed of a disk; give --nvme BLOCKS, too.")
    sizes = {
        "pool_blocks": _one_size(pool, "--pool"),
        "host_blocks": _one_size(host, "--host"),
        "disk_blocks": nvme_blocks,
    }
    if plot is not None:
        check_plot(plot)
    with masked():
        from kvray.console.progress import counting_progress
        from kvray.lab.replay import read_trace, simulator
        from kvray.lab.replay.report import report_curves, report_policies, report_routers
        from kvray.lab.replay.routers import ROUTERS, FleetPlan, compare_routers
        from kvray.lab.replay.simulator import check_curves
        from kvray.routing import Link, Rates

    policies, admissions = policy or [], admission or []
    if check_curve:
        policies, admissions = policies or ["gittins"], admissions or ["likely"]
    plan = simulator.Plan(
        policies=_names(policies, simulator.POLICIES, "--policy"),
        host_blocks=host_blocks,
        nvme_blocks=nvme_blocks,
        admissions=_names(admissions, simulator.ADMISSIONS, "--admission"),
    )
    known = [name for name in ROUTERS if name != "alone" or ingresses > 1]
    routers = _names(router, known, "--router")
    with counting_progress() as bar:
        task = bar.add_task("Reading", total=None)

        def show(title: str, done: int, total: int) -> None:
            bar.update(task, description=title, completed=done, total=total)

        read = read_trace(trace, block_tokens=block_tokens, concurrent=concurrent, seed=seed)
        report: Report
        if check_curve:
            report = report_curves(check_curves(read, plan, seed=seed, progress=show))
        elif replicas is not None:
            fleet_plan = FleetPlan(
                num_replicas=replicas,
                **sizes,
                speed=speed,
                deadline_s=deadline,
                imbalance_max=imbalance,
                num_ingresses=ingresses,
                seed=seed,
                rates=Rates(
                    prefill_tokens_per_s=prefill_rate,
                    token_bytes=parse_option("--token-bytes", token_bytes),
                    host=Link(bytes_per_s=1e9 * copy_rate),
                    remote=Link(latency_s=_LINK_LATENCY_S, bytes_per_s=1e9 * link_rate),
                    disk=Link(bytes_per_s=1e9 * disk_rate) if nvme_blocks else None,
                ),
            )
            routed = compare_routers(read, fleet_plan, routers, progress=show)
            report = report_routers(routed, concurrent=concurrent)
        else:
            found = simulator.compare(read, plan, progress=show)
            report = report_policies(found, concurrent=concurrent, seed=seed)
    report.show(as_json=as_json, plot=plot)


def parse_sizes(texts: list[str], option: str) -> list[int]:
    """Return numbers of blocks, ascending, each once; texts are such as `["1k,5k", "30000"]`."""
    return sorted({_one_size(text, option) for text in _split(texts)})


def _one_size(text: str, option: str) -> int:
    found = fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)([kM]?)\s*", text)
    size = Decimal(found[1]) * _MULTIPLES[found[2]] if found else Decimal(0)
    if size <= 0 or size != int(size):
        raise ConfigError(
            f"{option}: {text!r} is no number of blocks; write for example 5000, 5k or 1.5M."
        )
    return int(size)


def _names(given: Names, known: Sequence[str], option: str) -> Sequence[str]:
    names = _split(given or [])
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{option}: there is no {name!r}; {meant}known: {', '.join(known)}.")
    return names or known


def _split(texts: list[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",")]
