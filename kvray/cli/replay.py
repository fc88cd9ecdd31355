"""`kvray replay`: its options, for policies, for routers and for a shard's curve."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from re import fullmatch
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvray.console.interrupts import masked
from kvray.console.options import JsonOption, VerboseOption
from kvray.console.output import PlotOption, boundary, check_plot, printer
from kvray.errors import ConfigError

if TYPE_CHECKING:
    from kvray.lab.replay.routers import FleetPlan
    from kvray.lab.report import Report

DEFAULTS: Mapping[str, int] = {
    **{"pool": 800, "host": 3_000, "speed": 1, "deadline": 5, "imbalance": 10},
    **{"prefill_rate": 12_000, "token_bytes": 163_840},
    **{"copy_rate": 20, "link_rate": 10, "disk_rate": 3},
}
"""docs/replay.md says where they are from."""
_LINK_LATENCY_S = 0.002
_MULTIPLES = {"": 1, "k": 1_000, "M": 1_000_000}
_CAPACITIES = "1k,5k,10k,30k,100k"


def _option(name: str, metavar: str, text: str, **bounds: Any) -> Any:
    return typer.Option(metavar=metavar, help=f"{text} Default: {DEFAULTS[name]}.", **bounds)


def _positive(name: str, metavar: str, text: str) -> Any:
    return _option(name, metavar, text, min=1e-6, max=1e12)


def refuse(given: Mapping[str, object], why: str) -> None:
    """Raise ConfigError if one of the options was given."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {why}.")


def make_plan(
    replicas: int, given: Mapping[str, Any], *, disk_blocks: int, seed: int
) -> "FleetPlan":
    """Return the plan of the options that were given; for None it takes the default."""
    from kvray.lab.replay.routers import FleetPlan
    from kvray.routing import Link, Rates

    values = {
        name: default if given[name] is None else given[name] for name, default in DEFAULTS.items()
    }
    return FleetPlan(
        num_replicas=replicas,
        pool_blocks=values["pool"],
        host_blocks=values["host"],
        disk_blocks=disk_blocks,
        speed=values["speed"],
        deadline_s=values["deadline"],
        imbalance_max=values["imbalance"],
        seed=seed,
        rates=Rates(
            prefill_tokens_per_s=values["prefill_rate"],
            token_bytes=values["token_bytes"],
            host=Link(bytes_per_s=1e9 * values["copy_rate"]),
            remote=Link(latency_s=_LINK_LATENCY_S, bytes_per_s=1e9 * values["link_rate"]),
            disk=Link(bytes_per_s=1e9 * values["disk_rate"]) if disk_blocks else None,
        ),
    )


Names = list[str] | None


def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Mooncake's JSON lines, or agentic sessions: a file, a directory or an archive.",
        ),
    ],
    capacity: Annotated[
        Names,
        typer.Option(metavar="BLOCKS", help=f"Sizes of the host tier. Default: {_CAPACITIES}."),
    ] = None,
    policy: Annotated[
        Names, typer.Option(metavar="NAME", help="gittins or lru. Default: both.")
    ] = None,
    nvme: Annotated[
        str | None, typer.Option(metavar="BLOCKS", help="Put an NVMe tier of this size below.")
    ] = None,
    admission: Annotated[
        Names,
        typer.Option(metavar="NAME", help="NVMe admission: all, twice or likely. Default: each."),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            **{"min": 1, "max": 1_000_000, "metavar": "N"},
            help="Tokens of a block, if the trace does not say it. Default: 512.",
        ),
    ] = None,
    concurrent: Annotated[
        int,
        typer.Option(
            **{"min": 1, "max": 1_000_000, "metavar": "N"},
            help="Sessions at the same time, if the trace has no start times.",
        ),
    ] = 16,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**32 - 1, metavar="N", help="Decides the order in which sessions begin."
        ),
    ] = 0,
    check_curve: Annotated[
        bool,
        typer.Option(
            "--check-curve",
            help="Check the curve of `kvray size` on this trace, by full replays. Default policy:"
            " gittins.",
        ),
    ] = False,
    replicas: Annotated[
        int | None,
        typer.Option(
            **{"min": 1, "max": 512, "metavar": "N"},
            help="Compare routers instead, on N replicas with a node each.",
        ),
    ] = None,
    router: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="round_robin, pow2, affinity or kvray. Default: all."),
    ] = None,
    pool: Annotated[str | None, _option("pool", "BLOCKS", "Size of a replica's own pool.")] = None,
    host: Annotated[
        str | None, _option("host", "BLOCKS", "The tier's memory of each node.")
    ] = None,
    speed: Annotated[
        float | None, _positive("speed", "X", "Divide the trace's times by X: more load.")
    ] = None,
    deadline: Annotated[
        float | None, _positive("deadline", "S", "First tokens after S seconds are no goodput.")
    ] = None,
    imbalance: Annotated[
        int | None,
        _option(
            "imbalance",
            "N",
            "Queues may differ by N before affinity does as pow2.",
            min=0,
            max=1_000_000,
        ),
    ] = None,
    prefill_rate: Annotated[
        float | None, _positive("prefill_rate", "TOKENS/S", "Prefill of a replica.")
    ] = None,
    token_bytes: Annotated[
        float | None, _positive("token_bytes", "BYTES", "KV cache of one token.")
    ] = None,
    copy_rate: Annotated[
        float | None, _positive("copy_rate", "GB/S", "From a node's memory to its pool.")
    ] = None,
    link_rate: Annotated[float | None, _positive("link_rate", "GB/S", "From node to node.")] = None,
    disk_rate: Annotated[
        float | None, _positive("disk_rate", "GB/S", "From disk to memory, with --nvme.")
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    verbose: VerboseOption = False,
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
    fleet = {
        **{"pool": pool, "host": host, "speed": speed, "deadline": deadline},
        **{"imbalance": imbalance, "prefill_rate": prefill_rate, "token_bytes": token_bytes},
        **{"copy_rate": copy_rate, "link_rate": link_rate, "disk_rate": disk_rate},
    }
    with boundary(verbose=verbose):
        if check_curve and (replicas is not None or plot is not None):
            raise ConfigError("--check-curve goes with neither --replicas nor --plot.")
        if replicas is None:
            refuse({"router": router, **fleet}, "is for routers; give --replicas N, too")
        else:
            given = {"capacity": capacity, "policy": policy, "admission": admission}
            refuse(given, "is for policies; leave --replicas out")
        host_blocks = parse_sizes(capacity or [_CAPACITIES], "--capacity")
        nvme_blocks = _one_size(nvme, "--nvme") if nvme is not None else 0
        if admission and not nvme_blocks:
            raise ConfigError("--admission decides what goes to disk; give --nvme BLOCKS, too.")
        if disk_rate is not None and not nvme_blocks:
            raise ConfigError("--disk-rate is the speed of a disk; give --nvme BLOCKS, too.")
        for name in ("pool", "host"):
            if fleet[name] is not None:
                fleet[name] = _one_size(str(fleet[name]), f"--{name}")
        if plot is not None:
            check_plot(plot)
        with masked():
            from kvray.console.progress import counting_progress
            from kvray.lab.replay import read_trace, simulator
            from kvray.lab.replay.curve_check import check_curves
            from kvray.lab.replay.report import report_curves, report_policies, report_routers
            from kvray.lab.replay.routers import ROUTERS, compare_routers

        policies, admissions = policy or [], admission or []
        if check_curve:
            policies, admissions = policies or ["gittins"], admissions or ["likely"]
        plan = simulator.Plan(
            policies=_names(policies, simulator.POLICIES, "--policy"),
            host_blocks=host_blocks,
            nvme_blocks=nvme_blocks,
            admissions=_names(admissions, simulator.ADMISSIONS, "--admission"),
        )
        routers = _names(router, list(ROUTERS), "--router")
        with counting_progress(printer(is_error=True)) as bar:
            task = bar.add_task("Reading", total=None)

            def show(title: str, done: int, total: int) -> None:
                bar.update(task, description=title, completed=done, total=total)

            read = read_trace(trace, block_tokens=block_tokens, concurrent=concurrent, seed=seed)
            report: Report
            if check_curve:
                report = report_curves(check_curves(read, plan, seed=seed, progress=show))
            elif replicas is not None:
                fleet_plan = make_plan(replicas, fleet, disk_blocks=nvme_blocks, seed=seed)
                routed = compare_routers(read, fleet_plan, routers, progress=show)
                report = report_routers(routed, concurrent=concurrent)
            else:
                found = simulator.compare(read, plan, simulator.simulate, progress=show)
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
    """Return the names that an option has, or all known ones."""
    names = _split(given or [])
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{option}: there is no {name!r}; {meant}known: {', '.join(known)}.")
    return names or known


def _split(texts: list[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",")]
