"""The page's server: files of the package, and the state of the board as JSON; it only reads."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

from kvray.cli.page.board import Board
from kvray.cli.page.gate import Gate
from kvray.errors import ConfigError

_FILES = Path(__file__).parent / "static"
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


def make_app(board: Board, gate: Gate, look: Callable[[], None]) -> FastAPI:
    """Return the server; it calls `look` whenever somebody looks at the tier."""
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
    async def state(request: Request, since: Annotated[float, Query(ge=0)] = 0.0) -> Response:
        if not gate.admits(request):
            says = "This tier has a token; give it as a Bearer in the header Authorization."
            return JSONResponse({"says": says}, _UNAUTHORIZED)
        look()
        response = JSONResponse(board.state(time.time(), since))
        gate.remember(response)
        return response

    app.mount("/static", StaticFiles(directory=_FILES))
    return app
