"""The page's server: files, and the page's state as JSON, for those whom its gate admits."""

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

from kvray.cli.page.state import PageState
from kvray.config import KVRayConfig
from kvray.errors import ConfigError
from kvray.identity.block import frame
from kvray.identity.tenant import read_secret

_MISDIRECTED, _UNAUTHORIZED, _UNAVAILABLE = 421, 401, 503
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none';"
    " form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""The browser loads and shows nothing but what comes from here."""


class Gate:
    """Decides about requests; it reads the token at each, so that a new one holds at once."""

    def __init__(self, config: KVRayConfig, *, names: Iterable[str], port: int) -> None:
        """Admit browsers that call this server by one of `names`, or by an address."""
        self._token_file = config.security.auth_token_file
        self._cluster_name = config.cluster_name
        self._names = frozenset(name.lower() for name in names)
        self._cookie = f"kvray_{port}"  # browsers send cookies to all ports of a host

    def knows_host(self, request: Request) -> bool:
        """Return whether the request means this server.

        A page of somebody else may have its own name point here (DNS rebinding), and would read the
        answers. It cannot do that with an address.
        """
        try:
            name = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def admits(self, request: Request) -> bool:
        """Return whether the request has the token, if any; ConfigError: it cannot be read."""
        if self._token_file is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        token = given if scheme.lower() == "bearer" else request.query_params.get("token", "")
        proofs = [request.cookies.get(self._cookie, ""), self._proof(token.strip().encode())]
        expected = self._expected().encode()
        return any(hmac.compare_digest(expected, proof.encode()) for proof in proofs)

    def remember(self, response: Response) -> None:
        """Have the browser prove from now on that it had the token; it does not keep the token."""
        if self._token_file is not None:
            response.set_cookie(
                self._cookie, self._expected(), httponly=True, samesite="strict", path="/"
            )

    def _expected(self) -> str:
        assert self._token_file is not None
        return self._proof(read_secret(self._token_file, setting="security.auth_token_file"))

    def _proof(self, token: bytes) -> str:
        message = frame(b"kvray.page", self._cluster_name.encode())
        return hmac.new(token, message, hashlib.sha256).hexdigest()


_FILES = Path(__file__).parent / "static"


def make_app(page_state: PageState, gate: Gate, look: Callable[[int | None], None]) -> FastAPI:
    """Return the server; it calls `look` whenever somebody looks at the tier, or for a request."""
    html = (_FILES / "page.html").read_text()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(
        request: Request, pass_on: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        if gate.knows_host(request):
            response = await pass_on(request)
        else:
            says = "This server has no such name; reach it by its address, also from a proxy."
            response = JSONResponse({"says": says}, _MISDIRECTED)
        response.headers.update(_HEADERS)
        return response

    @app.exception_handler(ConfigError)
    async def refuse(_: Request, error: ConfigError) -> Response:
        return JSONResponse({"says": str(error)}, _UNAVAILABLE)

    @app.get("/")
    async def page(request: Request) -> Response:
        is_admitted = gate.admits(request)
        if "token" not in request.query_params or not is_admitted:
            locked = "" if is_admitted else " data-locked"
            return HTMLResponse(html.replace("<html", f"<html{locked}", 1))
        response = RedirectResponse("./", status_code=303)  # out of the address and the history
        gate.remember(response)
        return response

    @app.get("/state")
    async def state(
        request: Request,
        since: Annotated[float, Query(ge=0)] = 0.0,
        find: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        if not gate.admits(request):
            says = "This tier has a token; give it as a Bearer in the header Authorization."
            return JSONResponse({"says": says}, _UNAUTHORIZED)
        look(find)
        response = JSONResponse(page_state.state(time.time(), since))
        gate.remember(response)
        return response

    app.mount("/static", StaticFiles(directory=_FILES))
    return app
