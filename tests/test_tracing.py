"""--enable-trace: one trace a sequence, four spans, times that the request's own record has."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from test_request_log import Server

from jserve.engine.tracing import Tracer
from jserve.errors import ConfigError
from jserve.types import FinishReason, GenerateRequest, Output, SamplingParams, Times, Transcript

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NAMES = ["prompt", "cache", "execution", "output"]


class Traced:
    """A server whose spans stay here."""

    def __init__(self, **flags: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.server = Server(**flags)
        self.tracer = Tracer("localhost:4317", "m", self.exporter)
        self.server.engine.request_log._reporters.append(self.tracer)

    def __enter__(self) -> Traced:
        return self

    def __exit__(self, *_: object) -> None:
        self.tracer.close()
        self.server.engine.shutdown()

    def spans(self) -> list[ReadableSpan]:
        self.tracer.flush()
        spans = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return spans


def test_a_request_is_one_trace_of_four_spans_that_follow_each_other() -> None:
    with Traced() as traced:
        traced.server.generate("hello" * 30, rid="r")
        *spans, root = traced.spans()
    assert [span.name for span in spans] == NAMES and root.name == "request"
    assert {span.context.trace_id for span in (*spans, root)} == {root.context.trace_id}
    assert all(span.parent and span.parent.span_id == root.context.span_id for span in spans)
    assert root.parent is None and root.attributes["jserve.rid"] == "r"
    prompt, cache, execution, output = spans
    assert root.start_time == prompt.start_time and root.end_time == output.end_time
    assert prompt.end_time == execution.start_time and execution.end_time == output.start_time
    assert execution.start_time <= cache.start_time <= cache.end_time <= execution.end_time
    assert prompt.attributes["jserve.prompt_tokens"] == 150
    assert cache.attributes["jserve.cached_tokens"] == 0
    assert execution.attributes["jserve.steps"] == 7  # three chunks, of which the last samples
    assert execution.attributes["jserve.retractions"] == 0
    assert execution.attributes["jserve.queue_seconds"] >= 0
    assert output.attributes["jserve.completion_tokens"] == 5
    assert output.attributes["jserve.finish_reason"] == "length"
    seconds = sum(span.attributes["jserve.seconds"] for span in spans)
    assert seconds == pytest.approx((root.end_time - root.start_time) / 1e9, abs=1e-5)


def test_the_parent_comes_from_the_traceparent_header_or_field() -> None:
    with Traced() as traced:
        server = traced.server

        async def send(path: str, body: dict, headers: dict) -> None:
            import httpx

            transport = httpx.ASGITransport(app=server.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
                reply = await client.post(path, json=body, headers=headers)
                assert reply.status_code == 200, reply.text

        native = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
        asyncio.run(send("/generate", native, {"traceparent": PARENT}))
        field = {**native, "external_trace_header": {"traceparent": PARENT}}
        asyncio.run(send("/generate", field, {}))
        openai = {"prompt": "a", "max_tokens": 2, "stream": True}
        asyncio.run(send("/v1/completions", openai, {"traceparent": PARENT}))
        asyncio.run(send("/generate", native, {"traceparent": "nonsense"}))
        roots = [span for span in traced.spans() if span.name == "request"]
    assert len(roots) == 4
    for root in roots[:3]:
        assert f"{root.context.trace_id:032x}" == PARENT.split("-")[1]
        assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT.split("-")[2]
    assert roots[3].parent is None


@pytest.mark.parametrize("sampling", [{"n": 3}, {"stop": ["q", "w", "e"], "max_new_tokens": 60}])
def test_every_sequence_has_a_trace_and_one_that_was_left_has_none(sampling: dict) -> None:
    async def leave(server: Server) -> None:
        request = GenerateRequest(text="x", sampling=SamplingParams(), stream=True)
        stream = server.engine.generate_stream(request)
        await anext(stream)
        await stream.aclose()

    with Traced() as traced:
        traced.server.generate("hello", sampling_params=sampling)
        spans = traced.spans()
        asyncio.run(leave(traced.server))
        assert traced.spans() == []
    traces = {span.context.trace_id for span in spans}
    assert len(traces) == sampling.get("n", 1) and len(spans) == 5 * len(traces)
    assert all(span.end_time >= span.start_time > 0 for span in spans)
    assert all(s.attributes["jserve.seconds"] >= 0 for s in spans if s.name in NAMES)


def test_retractions_and_the_queue_are_told() -> None:
    exporter = InMemorySpanExporter()
    tracer = Tracer("localhost:4317", "m", exporter)
    times = Times(created=100.0, sent=100.5, queued=2.0, cache=0.25, ended=110.0, latest=110.5)
    times.num_steps, times.prefill_finished = 42, 103.0
    output = Output(
        index=0,
        rid="r",
        transcript=Transcript(ids=[], text=io.StringIO()),
        text_len=0,
        delta="",
        new_ids=[],
        finish=FinishReason(type="stop", matched=3),
        prompt_tokens=10,
        completion_tokens=4,
        cached_tokens=8,
        num_retractions=2,
        times=times,
    )
    tracer.ended(GenerateRequest(sampling=SamplingParams(), text="x"), "r", output)
    tracer.close()
    prompt, cache, execution, out, _ = exporter.get_finished_spans()
    assert (prompt.start_time, prompt.end_time) == (100 * 10**9, 1005 * 10**8)
    assert (cache.start_time, cache.end_time) == (10225 * 10**7, 1025 * 10**8)
    assert cache.attributes["jserve.cached_tokens"] == 8
    facts = {"queue_seconds": 2.0, "prefill_seconds": 0.5, "steps": 42, "retractions": 2}
    assert {k: execution.attributes[f"jserve.{k}"] for k in facts} == facts
    assert execution.attributes["jserve.seconds"] == pytest.approx(9.25)
    assert out.attributes["jserve.finish_reason"] == "stop"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_reach_a_collector_and_its_absence_holds_up_neither_requests_nor_the_end() -> None:
    collector = Collector()
    backend = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, backend)
    port = backend.add_insecure_port("127.0.0.1:0")
    backend.start()
    flags = {"enable_trace": True, "otlp_traces_endpoint": f"127.0.0.1:{port}"}
    with Server(**flags) as server:
        server.generate()
    backend.stop(0)
    assert [span.name for span in collector.spans] == [*NAMES, "request"]
    with Server(**flags) as server:  # nobody listens now
        began = time.monotonic()
        server.generate()
        assert time.monotonic() - began < 2
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert len(collector.spans) == 5


def test_a_missing_package_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def absent(name: str, package: str | None = None) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, package)

    monkeypatch.setattr("jserve.engine.tracing.importlib.import_module", absent)
    with pytest.raises(ConfigError, match=r"--enable-trace.*pip install 'jserve\[otel\]'"):
        Server(enable_trace=True)


def test_nothing_of_it_is_loaded_without_the_flag() -> None:
    script = (
        "import sys, jserve.engine.engine, jserve.server.app\n"
        "heavy = ('opentelemetry.sdk', 'opentelemetry.exporter', 'grpc')\n"
        "assert not [name for name in sys.modules if name.startswith(heavy)]\n"
        "print('clean')"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.stdout == "clean\n", done.stderr
