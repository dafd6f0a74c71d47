"""OpenTelemetry traces, under --enable-trace: a sequence is one trace of five spans.

    request ┬ prompt      text to ids, until it is sent to the engine
            ├ cache       match and allocation; as long as they took, where the queue ended
            ├ execution   queue and steps, until the engine ends it
            └ output      from there until its last text is made

Made when the sequence ends, from the times that its Deltas carried: the engine knows nothing of
traces. The package is an extra, imported when a tracer is made.
"""

from __future__ import annotations

import importlib
from typing import Any

from jserve.errors import ConfigError
from jserve.metrics.boundary import boundaries
from jserve.types import GenerateRequest, Output, Submit

_INSTALL = "--enable-trace needs OpenTelemetry: pip install 'jserve[otel]'"
_TIMEOUT = 2  # seconds to send a batch


def require_telemetry() -> None:
    """Raises ConfigError without the package."""
    try:
        for name in ("sdk.trace.export", "exporter.otlp.proto.grpc.trace_exporter"):
            importlib.import_module(f"opentelemetry.{name}")
    except ImportError as error:
        raise ConfigError(f"{_INSTALL} ({error})") from None


class Tracer:
    """A Reporter.

    Args:
        endpoint: host:port of an OTLP collector (gRPC); with https:// before it, over TLS.
        service: the model's name.
        exporter: in place of OTLP's; for tests.

    Raises ConfigError without the package.
    """

    def __init__(self, endpoint: str, service: str, exporter: Any = None) -> None:
        require_telemetry()
        self._api = importlib.import_module("opentelemetry.trace")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        propagation = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
        resource = resources.Resource.create({"service.name": "jserve", "jserve.model": service})
        self._provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        if exporter is None:
            secure = endpoint.startswith("https://")
            exporter = otlp.OTLPSpanExporter(endpoint, insecure=not secure, timeout=_TIMEOUT)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jserve")
        self._propagator = propagation.TraceContextTextMapPropagator()

    def received(self, request: GenerateRequest, submit: Submit) -> None:
        """Nothing yet: a trace is made when its sequence ends."""

    def ended(self, request: GenerateRequest, rid: str, output: Output | None) -> None:
        if output is None or output.finish is None:
            return
        times, carrier = output.times, {"traceparent": request.traceparent or ""}
        cache_end = times.sent + times.queued
        seconds = boundaries(times)
        root = self._tracer.start_span(
            "request",
            context=self._propagator.extract(carrier),
            kind=self._api.SpanKind.SERVER,
            start_time=_ns(times.created),
            attributes={"jserve.rid": rid, "jserve.finish_reason": output.finish.type},
        )
        context = self._api.set_span_in_context(root)
        spans = {
            "prompt": (times.created, times.sent, {"prompt_tokens": output.prompt_tokens}),
            "cache": (
                max(cache_end - times.cache, times.sent),
                max(cache_end, times.sent + times.cache),
                {"cached_tokens": output.cached_tokens},
            ),
            "execution": (
                times.sent,
                times.ended,
                {
                    "queue_seconds": times.queued,
                    "prefill_seconds": max(times.prefill_finished - cache_end, 0.0),
                    "steps": times.num_steps,
                    "retractions": output.num_retractions,
                },
            ),
            "output": (
                times.ended,
                times.latest,
                {
                    "completion_tokens": output.completion_tokens,
                    "finish_reason": output.finish.type,
                },
            ),
        }
        for name, (start, end, facts) in spans.items():
            attributes = {f"jserve.{key}": value for key, value in facts.items()}
            attributes["jserve.seconds"] = seconds[name]  # those of execution without the cache's
            span = self._tracer.start_span(
                name, context, start_time=_ns(start), attributes=attributes
            )
            span.end(_ns(end))
        root.end(_ns(times.latest))

    def flush(self) -> None:
        """Send what is there."""
        self._provider.force_flush(1000 * _TIMEOUT)

    def close(self) -> None:
        """Send what is left, and stop."""
        self._provider.shutdown()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
