"""The child's side of a replica: an engine that answers its parent's calls."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from typing import Any

from kvray.errors import ConfigError, KVRayError
from kvray.reference import child_process
from kvray.reference.output import Call, Output, Prompt


def serve(start: Callable[..., Any]) -> None:
    """Serve the parent until it closes its pipe, with the engine that `start` makes of its options.

    The engine has `submit`, `cancel` and `close`, as `ReferenceEngine` has.
    """
    served = _Served(start)
    child_process.serve(served)
    if served.engine is not None:
        served.engine.close()


class _Served:
    """The calls of a `Replica`."""

    def __init__(self, start: Callable[..., Any]) -> None:
        self.engine: Any = None
        self._start = start

    def start(self, **options: Any) -> None:
        try:
            self.engine = self._start(**options)
        except TypeError as error:  # there is no such option
            raise ConfigError(str(error)) from error

    def generate(self, *, prompts: Sequence[Prompt], timeout_s: float, **more: Any) -> list[Output]:
        """Answer the prompts, all of them in flight at once.

        If one fails or is late the others are cancelled, and the error comes when all have ended:
        an engine that ends none of them does not answer, and the parent kills it.
        """
        deadline = time.monotonic() + timeout_s
        calls: list[Call] = []
        try:
            for prompt in prompts:
                calls.append(self.engine.submit(prompt, **more))
            return [call.future.result(max(deadline - time.monotonic(), 0)) for call in calls]
        except FutureTimeoutError:
            late = f"a request has not ended within {timeout_s:.0f} s."
            raise KVRayError(late) from None
        except UnicodeError as error:  # text that the tokenizer cannot write
            raise ConfigError(str(error)) from error
        finally:
            for call in calls:
                if not call.future.done():
                    self.engine.cancel(call)
            wait([call.future for call in calls])


def _reference_engine(**options: Any) -> Any:
    from kvray.reference.engine import ReferenceEngine  # late: it imports torch

    return ReferenceEngine(**options)


if __name__ == "__main__":
    serve(_reference_engine)
