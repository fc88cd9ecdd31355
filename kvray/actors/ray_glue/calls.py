"""Calls to named actors, with deadlines and our own errors; `ActorCalls` from an event loop."""

import asyncio
import contextlib
import logging
import os
import time
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvray import __version__
from kvray.actors.names import (
    LOOKUP_NAME,
    NAMESPACE_PREFIX,
    SUPERVISOR_NAME,
    namespace_of,
    shard_name,
)
from kvray.actors.telemetry.log_lines import Lines, Quiet
from kvray.errors import KVRayError, ShardUnavailable

_HEAD_RESOURCE = "node:__internal_head__"
"""Of Ray's head: lookup and supervisor run there, and no other node takes them along."""
_POLL_S = 0.1

_namespace: ContextVar[str | None] = ContextVar("kvray_namespace", default=None)


@contextlib.contextmanager
def mapped_errors() -> Iterator[None]:
    """Turn Ray's exceptions into kvray's; also a decorator."""
    try:
        yield
    except RayTaskError as error:
        cause = error.cause if hasattr(error, "cause") else None
        if isinstance(cause, KVRayError):
            raise cause from None
        raise ShardUnavailable(
            f"An actor of the tier failed by a defect ({in_short(error)}); see its log."
        ) from error
    except GetTimeoutError:
        raise ShardUnavailable(
            "An actor of the tier did not answer in time; see `kvray status`."
        ) from None
    except RayError as error:
        raise ShardUnavailable(
            f"An actor of the tier is gone ({in_short(error)}); if that lasts for minutes, run"
            " `kvray down`, then `kvray up`."
        ) from None


@contextlib.contextmanager
def tier_named(cluster_name: str) -> Iterator[None]:
    """Mean the tier of that name in this block, whatever namespace this process joined."""
    before = _namespace.set(namespace_of(cluster_name))
    try:
        yield
    finally:
        _namespace.reset(before)


def current_namespace() -> str:
    """Return the Ray namespace of the tier that is meant: by default that of this process."""
    return _namespace.get() or str(ray.get_runtime_context().namespace)


@mapped_errors()
def create_actor(
    actor: type,
    name: str,
    *args: Any,
    node_id: str | None = None,
    groups: Mapping[str, int] | None = None,
    **options: Any,
) -> Any:
    """Return the actor of that name, on the head or the node named; start it if there is none.

    It outlives its creator, restarts whenever it ends, and gets no call twice. `groups`:
    concurrency group -> calls that may run at once. `actor` has no `__repr__` of its own: where it
    cannot be imported, Ray's stand-in for it raises there, which ends its process, again and again.
    """
    if node_id is None:
        options["resources"] = {_HEAD_RESOURCE: 0.001}
    else:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
    made = ray.remote(concurrency_groups=dict(groups or {}))(actor)  # type: ignore[call-overload]
    return made.options(
        name=name,
        namespace=current_namespace(),
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=0,
        **options,
    ).remote(*args)


def on_node(node_id: str, function: Callable[..., Any]) -> Any:
    """Return `function` as a method for `ask_all`, which runs once, on that node."""
    affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=affinity)


@mapped_errors()
def get_actor(name: str) -> Any:
    """Return the handle of a named actor of the tier; ShardUnavailable if there is none."""
    namespace = current_namespace()
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        tier = namespace.removeprefix(NAMESPACE_PREFIX)
        tiers = {where for one, where in _named_actors() if one == LOOKUP_NAME} - {namespace}
        others = sorted(one.removeprefix(NAMESPACE_PREFIX) for one in tiers)
        if name not in (LOOKUP_NAME, SUPERVISOR_NAME):
            others = []  # the tier may be there, without this part of it
        fix = f"set cluster_name to a tier that runs ({', '.join(others)}), or " if others else ""
        raise ShardUnavailable(
            f"The tier {tier!r} has no actor {name} in this Ray cluster; {fix}start the tier with"
            " `kvray up`."
        ) from None


@mapped_errors()
def call(method: Any, *args: Any, timeout_s: float) -> Any:
    """Call an actor's method; ShardUnavailable without an answer within `timeout_s`."""
    return ray.get(method.remote(*args), timeout=timeout_s)


def ask_all(
    methods: Mapping[str, Any],
    timeout_s: float,
    *args: Any,
    meanwhile: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Call all `methods` at once; return name -> its answer, or its error.

    `meanwhile` is called often until all have answered.
    """
    calls = {name: _attempt(method.remote, *args) for name, method in methods.items()}
    deadline = time.monotonic() + timeout_s
    waiting = [one for one in calls.values() if not isinstance(one, KVRayError)]
    while meanwhile is not None and waiting and time.monotonic() < deadline:
        meanwhile()
        found = _attempt(ray.wait, waiting, num_returns=len(waiting), timeout=_POLL_S)
        waiting = [] if isinstance(found, KVRayError) else found[1]
    return {
        name: one
        if isinstance(one, KVRayError)
        else _attempt(ray.get, one, timeout=max(0.0, deadline - time.monotonic()))
        for name, one in calls.items()
    }


def all_of(answers: Mapping[str, Any]) -> list[Any]:
    """Return all answers of `ask_all`, or raise the first error among them."""
    for answer in answers.values():
        if isinstance(answer, KVRayError):
            raise answer
    return list(answers.values())


def _attempt(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what a function of Ray's returns, or its error as one of kvray's."""
    try:
        with mapped_errors():
            return function(*args, **options)
    except KVRayError as error:
        return error


def ask(
    names: Iterable[str],
    method: str,
    timeout_s: float,
    *args: Any,
    meanwhile: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Call a method of each named actor, as `ask_all`; one that has no such method is left out."""
    answers: dict[str, Any] = {}
    methods = {}
    for name in names:
        try:
            with contextlib.suppress(AttributeError):
                methods[name] = getattr(get_actor(name), method)
        except ShardUnavailable as error:
            answers[name] = error
    return answers | ask_all(methods, timeout_s, *args, meanwhile=meanwhile)


def ask_shards(method: str, timeout_s: float, *args: Any) -> dict[str, Any]:
    """Call a method of each shard that the supervisor knows, as `ask`.

    ShardUnavailable: no tier runs in this Ray cluster.
    """
    shards = call(get_actor(SUPERVISOR_NAME).shards, timeout_s=timeout_s)
    return ask(map(shard_name, shards), method, timeout_s, *args)


class PeriodicPing:
    """Calls an actor now and then, and does not wait for its answer.

    A process that could not become its actor, because of a full disk for example, counts as running
    until somebody calls it. Only then does it end, and Ray starts the next.
    """

    def __init__(self, name: str, method: str = "ping", *args: Any, every_s: float) -> None:
        self._name, self._method, self._args = name, method, args
        self._every_s = every_s
        self._due = 0.0
        self._answer: Any = None

    def send(self, now: float) -> None:
        """Call it if it is time, and it has answered the last one."""
        if now < self._due:
            return
        self._due = now + self._every_s
        with contextlib.suppress(KVRayError), mapped_errors():
            if self._answer is None or ray.wait([self._answer], timeout=0)[0]:
                method = getattr(get_actor(self._name), self._method)
                self._answer = method.remote(*self._args)


@mapped_errors()
def list_actors(prefix: str = "kvray-") -> list[str]:
    """Return the names of the tier's living actors that begin with `prefix`."""
    here = current_namespace()
    return sorted(
        name for name, where in _named_actors() if where == here and name.startswith(prefix)
    )


def _named_actors() -> Iterator[tuple[str, str]]:
    """Give name and namespace of each living actor of a tier in this Ray cluster."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith("kvray-"):
            yield actor["name"], actor["namespace"]


def kill_actor(name: str) -> Any:
    """End the actor of that name for good; return its handle, None if there is none.

    Ray forgets the name a moment later.
    """
    actor = None
    with contextlib.suppress(KVRayError), mapped_errors():
        actor = get_actor(name)
        ray.kill(actor)
    return actor


def await_end(name: str, ended: Any, timeout_s: float) -> bool:
    """Wait until a killed actor, whose handle is `ended`, has its name no more.

    The supervisor may have given it to another one.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(KVRayError):
        while name in list_actors() and get_actor(name) == ended:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
    return True


def node_labels() -> dict[str, str]:
    """Return the labels that Ray has given to the node of this process."""
    node_id = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return next((node.get("Labels", {}) for node in nodes if node["NodeID"] == node_id), {})


def hosts_of(node_ids: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return name and ip of the host of each of these nodes that Ray knows; never raises."""
    try:
        nodes = {one["NodeID"][:12]: one for one in ray.nodes()}  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001 - people can do without names, whatever is wrong with Ray
        return {}
    return {one: host_of(nodes[one]) for one in (name[:12] for name in node_ids) if one in nodes}


def host_of(node: Mapping[str, Any]) -> dict[str, str]:
    """Return name and ip of the host of one of `ray.nodes()`."""
    name = node.get("NodeManagerHostname") or "unknown host"
    return {"name": name, "ip": node.get("NodeManagerAddress") or ""}


def set_up_process() -> None:
    """Have an actor's process log kvray's events, and no others, and not come last."""
    log = logging.getLogger("kvray")
    if not log.handlers:
        handler = logging.StreamHandler()
        tier = current_namespace().removeprefix(NAMESPACE_PREFIX)
        handler.setFormatter(Lines(tier, ray.get_runtime_context().get_actor_name() or "kvray"))
        handler.addFilter(Quiet())
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    warnings.simplefilter("ignore", DeprecationWarning)  # Ray's, of calls that kvray needs
    log.info("starts with kvray %s, in process %d", __version__, os.getpid())
    _take_priority_of(os.getppid())


def _take_priority_of(raylet: int) -> None:
    """Give all threads the niceness of the raylet, which starts its workers with 15 more.

    Else a shard comes last where engines outside Ray keep all cores busy: each of their threads
    gets the time of 28 of its own. `kvray doctor` tells where the right to do this is missing.
    """
    niceness = os.getpriority(os.PRIO_PROCESS, raylet)
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # no right, or it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread), niceness)


def in_short(error: BaseException) -> str:
    """Return the line of an error that says most: the first, or the last one of a traceback."""
    lines = [one for one in str(error).strip().splitlines() if not one.startswith("\t")]
    lines = lines or [type(error).__name__]
    is_last = lines[0].endswith("(most recent call last):")
    return lines[-1 if is_last or isinstance(error, RayTaskError | ActorDiedError) else 0]


_SEARCHES_MAX = 4
"""Threads that look for actors; while Ray's head does not answer, each look-up takes a minute."""
_HANDLES_MAX = 16_384


class ActorCalls:
    """The `Ask` of Ray's actors; used by one event loop."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}
        self._searches = ThreadPoolExecutor(_SEARCHES_MAX, "kvray-search")

    async def __call__(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        """See `Ask`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            if actor not in self._handles:
                # The thread must use this context's Ray namespace.
                search = asyncio.wrap_future(
                    self._searches.submit(copy_context().run, get_actor, actor)
                )
                self._handles[actor] = await _in_time(search, timeout_s, actor)
                if len(self._handles) > _HANDLES_MAX:
                    del self._handles[next(iter(self._handles))]
            with mapped_errors():
                answer = getattr(self._handles[actor], method).remote(*args).future()
                left_s = deadline - loop.time()
                return await _in_time(asyncio.wrap_future(answer), left_s, actor)
        except ShardUnavailable:
            self._handles.pop(actor, None)  # it may be recreated, under the same name
            raise


async def _in_time(answer: Awaitable[Any], timeout_s: float, actor: str) -> Any:
    try:
        return await asyncio.wait_for(answer, timeout_s)
    except asyncio.TimeoutError:
        raise ShardUnavailable(
            f"{actor} did not answer within {timeout_s:.2f} s; see `kvray status`."
        ) from None
