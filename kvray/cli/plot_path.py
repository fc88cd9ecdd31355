"""Where a command's picture goes: refused before anything is measured, not after."""

from importlib.util import find_spec
from pathlib import Path

from kvray.errors import ConfigError


def check_plot(path: Path) -> None:
    """Refuse a `--plot` that would fail only when everything else is done.

    Raises:
        ConfigError: matplotlib is missing, or there can be no such PNG.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; run `pip install 'kvray[bench]'`.")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot writes a PNG, not {path.name}; give a name that ends in .png.")
    if not path.parent.is_dir():
        raise ConfigError(f"There is no directory {path.parent} for --plot; make it first.")
