"""`kvray dashboard`: a page for browsers, the Grafana dashboard, and alerts for Prometheus."""

from pathlib import Path
from typing import Annotated

import typer
import yaml

from kvray.cli.page.command import serve
from kvray.config import load_config
from kvray.console.options import ConfigOption, option
from kvray.dashboards import ALERTS, DASHBOARD, package_file
from kvray.errors import ConfigError

dashboard = typer.Typer(
    name="dashboard",
    help="Show the tier on a page; install the Grafana dashboard and the Prometheus alerts.",
    no_args_is_help=True,
    add_completion=False,
)

dashboard.command()(serve)

_PROVIDERS = Path("metrics/grafana/provisioning/dashboards/default.yml")
_DISCOVERY = "prom_metrics_service_discovery.json"
TempDirOption = Annotated[
    Path | None,
    option(
        "DIR",
        "The --temp-dir of Ray's head.",
        default="that of this tier's local Ray, then /tmp/ray",
    ),
]


@dashboard.command()
def install(
    config: ConfigOption = None,
    ray_temp_dir: TempDirOption = None,
    target: Annotated[
        Path | None,
        option(
            "DIR",
            "A directory that a Grafana loads dashboards from; this needs no Ray.",
            names=["--to"],
        ),
    ] = None,
) -> None:
    """Put the dashboard where Ray's Grafana loads it; run this on the node of Ray's head.

    Each Ray session has a new directory: repeat this after a restart of Ray.
    """
    if target is not None:
        print(f"The dashboard is {put_dashboard(target)}.")
        return
    providers = _session(ray_temp_dir, config)[1] / _PROVIDERS  # what Ray's Grafana loads
    try:
        found = yaml.safe_load(providers.read_text())
        directory = Path(found["providers"][0]["options"]["path"])
    except (OSError, yaml.YAMLError, LookupError, TypeError):
        raise ConfigError(
            f"Ray has not written {providers}; start its head with the dashboard (`ray start"
            " --include-dashboard=true`, `kvray up --dashboard`), or give a Grafana's directory"
            " with --to."
        ) from None
    print(f"The dashboard is {put_dashboard(directory)}.")
    print("Each Ray session has a new directory: repeat this after a restart of Ray.")
    print("`kvray dashboard scrape` prints the configuration for Prometheus.")


@dashboard.command()
def scrape(config: ConfigOption = None, ray_temp_dir: TempDirOption = None) -> None:
    """Print a configuration for Prometheus: where the metrics and the alerts are."""
    temp_dir, _ = _session(ray_temp_dir, config)  # else it would find nothing, silently
    found = [{"files": [str(temp_dir / _DISCOVERY)]}]
    described = {
        "rule_files": [str(package_file(ALERTS))],
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": found}],
    }
    print(yaml.safe_dump(described, sort_keys=False), end="")


@dashboard.command()
def rules() -> None:
    """Print the alerts, as a rule file for Prometheus."""
    print(package_file(ALERTS).read_text(), end="")


@dashboard.command()
def show() -> None:
    """Print the dashboard as JSON, for an import into Grafana."""
    print(package_file(DASHBOARD).read_text(), end="")


def _session(ray_temp_dir: Path | None, config: Path | None) -> tuple[Path, Path]:
    """Return Ray's directory, by default the tier's local Ray's, and that of its latest session."""
    if ray_temp_dir is None:
        from kvray.actors.tier.local_ray import local_dir

        own = local_dir(load_config(config).cluster_name) / "ray"
        ray_temp_dir = own if own.is_dir() else Path("/tmp/ray")
    session = ray_temp_dir / "session_latest"
    if not session.is_dir():
        raise ConfigError(
            f"There is no Ray session in {ray_temp_dir}; run this on the node of Ray's head, and"
            " give its --temp-dir as --ray-temp-dir."
        )
    return ray_temp_dir, session.resolve()


def put_dashboard(directory: Path) -> Path:
    """Write the dashboard into `directory`, all of it or nothing. Twice is fine."""
    path = directory / f"kvray_{DASHBOARD}"
    text = package_file(DASHBOARD).read_text()
    try:
        made = path.with_suffix(".new")  # Grafana loads no such name
        made.write_text(text)
        made.chmod(0o644)  # Grafana may be another user
        made.replace(path)
    except OSError as error:
        raise ConfigError(
            f"The dashboard cannot be written to {directory} ({error.strerror}); run this on the"
            " node of Ray's head as the user of its Grafana directory."
        ) from None
    return path
