"""`kvray dashboard serve`: starts the page's server, fed by a process that asks the tier."""

import asyncio
import contextlib
import ipaddress
import json
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvray.cli.page.state import STATUS, PageState
from kvray.config import load_config
from kvray.console.options import AddressOption, ConfigOption, VerboseOption
from kvray.console.output import boundary
from kvray.errors import ConfigError, needs

if TYPE_CHECKING:
    from fastapi import FastAPI

_REQUESTS_MAX = 64
_END_S = 2
_LINE_BYTES_MAX = 64 * 2**20
_SILENT_S = 20.0
"""A process that says nothing for so long hangs: each of its questions has a deadline."""
_PAUSE_S = 1.0


def serve(
    host: Annotated[
        str, typer.Option(help="The address to listen at; 0.0.0.0 or :: is all of this machine's.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 is any free one.")] = 8270,
    config: ConfigOption = None,
    address: AddressOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Show the tier on a page for browsers, live, until Ctrl-C; it changes nothing."""
    with boundary(verbose=verbose):
        settings = load_config(config, overrides={"ray.address": address})
        with needs("dashboard"):
            import fastapi  # noqa: F401
            import uvicorn  # noqa: F401
        from kvray.cli.page.server import Gate, make_app

        with _listening(host, port) as listener, contextlib.suppress(KeyboardInterrupt):
            bound = listener.getsockname()
            names = (host, "localhost", socket.gethostname())
            gate = Gate(settings, names=names, port=bound[1])
            page_state = PageState(settings.cluster_name)
            feed = Feed(page_state, config, address, verbose=verbose)
            _announce(host, *bound[:2], has_token=settings.security.auth_token_file is not None)
            asyncio.run(_run(make_app(page_state, gate, feed.look), feed, listener))


class Feed:
    """The process that asks, and another one in its place when it ends or hangs."""

    def __init__(
        self, page_state: PageState, config: Path | None, address: str | None, *, verbose: bool
    ) -> None:
        """Feed `page_state` about the tier of a configuration file, in the Ray at `address`."""
        self._page_state = page_state
        self._command = [sys.executable, "-m", "kvray.cli.page.asker"]
        self._command += [str(config or ""), address or ""]
        self._stderr = None if verbose else DEVNULL
        self._process: Process | None = None

    def look(self, request_id: int | None = None) -> None:
        """Tell the process that somebody looks at the page, and perhaps for a request."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, RuntimeError):  # it has just ended
                self._process.stdin.write(
                    b"%s\n" % str("" if request_id is None else request_id).encode()
                )

    async def run(self) -> None:
        """Feed the page until this is cancelled."""
        while True:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=self._stderr,
                limit=_LINE_BYTES_MAX,
                start_new_session=True,  # Ctrl-C is for the page's process, which ends this one
            )
            try:
                why = await self._read(self._process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
            self._page_state.lose(why, time.time())
            await asyncio.sleep(_PAUSE_S)

    async def _read(self, process: Process) -> str:
        """Take answers until the process ends or hangs; return which of both."""
        assert process.stdout is not None
        heard_at = time.monotonic()
        while (left_s := heard_at + _SILENT_S - time.monotonic()) > 0:
            try:
                line = await asyncio.wait_for(process.stdout.readline(), left_s)
            except asyncio.TimeoutError:
                break
            if not line:
                return "The process that asks the tier has ended; the next one starts."
            told = json.loads(line)
            if told["part"] == STATUS:
                heard_at = time.monotonic()
            self._page_state.take(told, time.time())
        return "The Ray cluster does not answer; it is asked again."


async def _run(app: "FastAPI", feed: Feed, listener: socket.socket) -> None:
    """Serve until a signal comes; both parts end together."""
    import uvicorn

    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # it would have tokens
            lifespan="off",
            limit_concurrency=_REQUESTS_MAX,
            timeout_graceful_shutdown=_END_S,
        )
    )
    feeding = asyncio.create_task(feed.run())
    feeding.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        await server.serve(sockets=[listener])
    finally:
        feeding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await feeding


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    host = host.strip("[]")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        is_all = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=is_all)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", error)
        raise ConfigError(
            f"The page cannot listen at {host} port {port} ({why}); give another with"
            " --host or --port."
        ) from None
    with listener:
        yield listener


def _announce(host: str, bound_to: str, port: int, *, has_token: bool) -> None:
    """Print where the page is, and who else can read it."""
    if not ipaddress.ip_address(bound_to).is_loopback:
        who = "whoever has the token and" if has_token else "whoever"
        print(
            f"kvray: {who} reaches {host} can read the page, and nothing is encrypted on its way;"
            " `ssh -L` or a proxy with TLS keeps others out.",
            file=sys.stderr,
        )
    bare = host.strip("[]")
    shown = f"[{bare}]" if ":" in bare else bare
    print(f"The page is at http://{shown}:{port}/ until Ctrl-C.", flush=True)
