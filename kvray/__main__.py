"""The command `kvray`, also as `python -m kvray`."""

import signal


def main() -> None:
    """Run the command; a Ctrl-C while it loads, for a second, ends it without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvray.cli import main as run

    run()


if __name__ == "__main__":
    main()
