"""The page's server: files of the package, and the state of the board as JSON; it only reads."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

from kvray.cli.page.board import Board
from kvray.cli.page.gate import Gate, protect
from kvray.errors import ConfigError

_FILES = Path(__file__).parent / "static"
_MISDIRECTED, _UNAUTHORIZED, _UNAVAILABLE = 421, 401, 503


def make_app(board: Board, gate: Gate, look: Callable[[], None]) -> FastAPI:
    """Return the server; it calls `look` whenever somebody looks at the tier."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(
        request: Request, pass_on: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        if gate.knows_host(request):
            response = await pass_on(request)
        else:
            response = _said(
                "This server is not known by that name; if it should be, start it with"
                " --server-name.",
                _MISDIRECTED,
            )
        protect(response)
        return response

    @app.exception_handler(ConfigError)
    async def refuse(_: Request, error: ConfigError) -> Response:
        return _said(str(error), _UNAVAILABLE)

    @app.get("/")
    async def page(request: Request) -> Response:
        if "token" not in request.query_params or not gate.admits(request):
            return FileResponse(_FILES / "page.html")
        response = RedirectResponse("./", status_code=303)  # out of the address and the history
        gate.remember(response)
        return response

    @app.get("/state")
    async def state(request: Request, since: Annotated[float, Query(ge=0)] = 0.0) -> Response:
        if not gate.admits(request):
            return _said("This tier has a token; give it to see the page.", _UNAUTHORIZED)
        look()
        response = JSONResponse(board.state(time.time(), since))
        gate.remember(response)
        return response

    app.mount("/static", StaticFiles(directory=_FILES))
    return app


def _said(text: str, status: int) -> JSONResponse:
    content: dict[str, Any] = {"says": text}
    return JSONResponse(content, status_code=status)
