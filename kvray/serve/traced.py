"""What the endpoint tells OpenTelemetry of a request: the first span of its trace.

Names are of OpenTelemetry's conventions for generative AI where it has one. Nothing of a prompt or
of an answer is among them but their lengths.
"""

from opentelemetry.trace import StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvray.trace import spans

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
_FAULT = 500  # status from which on the server is to blame


class TracedRequests:
    """An ASGI middleware: the span `ingress` around each request that asks for an answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, until the last byte of a stream."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        operation = _OPERATIONS.get(path)
        if operation is None or scope["type"] != "http" or not spans.is_on():
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): one.decode("latin-1") for name, one in scope["headers"]}
        about = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "kvray",
            "http.request.method": scope["method"],
            "http.route": path,
        }
        with spans.request("ingress", headers, about) as made:
            is_whole = False

            async def tell(message: Message) -> None:
                nonlocal is_whole
                if message["type"] == "http.response.start":
                    made.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= _FAULT:
                        made.set_status(StatusCode.ERROR)
                else:
                    is_whole = not message.get("more_body", False)
                await send(message)

            await self._app(scope, receive, tell)
            if not is_whole:
                spans.fail(made, "disconnected")
