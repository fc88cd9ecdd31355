"""Sends this process's spans by OTLP over HTTP, as OpenTelemetry's own variables say."""

from kvray.errors import needs


def export() -> None:
    """Set up the SDK; a value for `tracing.startup_hook` and for Ray's `--tracing-startup-hook`.

    `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER` and the like hold.

    Raises:
        ConfigError: a package that the extra `otlp` brings is missing.
    """
    with needs("otlp"):
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    resource = Resource.create({"service.name": "kvray"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
