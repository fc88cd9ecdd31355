"""A collector of OpenTelemetry's, as far as it takes spans by OTLP over HTTP."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.kit.web import posts_taken


@dataclass
class Collector:
    """What came by OTLP: trace -> name of a span -> those of that name."""

    spans: dict[str, dict[str, list[Any]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    services: set[str] = field(default_factory=set)

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {attributes_of(resource.resource).get("service.name")}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans[span.trace_id.hex()][span.name].append(span)


def attributes_of(told: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in told.attributes}


@contextmanager
def open_collector() -> Iterator[tuple[Collector, str]]:
    """Have a collector for the time of a block; also yields its address."""
    collector = Collector()

    def take(_: str, body: bytes) -> tuple[int, str, bytes]:
        collector.take(body)
        return 200, "application/x-protobuf", b""

    with posts_taken(take) as address:
        yield collector, address
