"""What the commands of `kvray bench` have in common: options, and how a bench is run."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvray.console.output import boundary, check_plot

if TYPE_CHECKING:
    from kvray.lab.bench.report import Report
    from kvray.lab.bench.serving.report import ServingReport

QuickOption = Annotated[
    bool, typer.Option("--quick", help="Measure little: it shows that it works, not how fast.")
]


def run_bench(
    name: str,
    options: dict[str, Any],
    *,
    as_json: bool,
    plot: Path | None = None,
    verbose: bool,
    taken: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Have the bench of that name run with `options`, and show its report.

    `taken` names what a bench is given of a layer above its own, as `module:name`.
    """
    with boundary(verbose=verbose) as interrupts:
        if plot is not None:
            check_plot(plot)
        with interrupts.masked():  # importing starts threads
            from kvray.lab.bench.runner import running

            module = import_module(f"kvray.lab.bench.{name}")
            options |= {option: resolve_name(path) for option, path in taken.items()}
        with running(interrupts) as runner:
            report: Report | ServingReport = module.run(runner, **options)
        if as_json:
            print(report.to_json())
        else:
            report.show()
        if plot is not None:
            report.draw(plot)
