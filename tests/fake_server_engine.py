"""An engine that computes its Outputs by hand, and a byte tokenizer, for tests of the HTTP routes.

Token i of sequence s after a prompt is `a` + (sum(prompt) + i + s) mod 26. Its log-probability is
−(id mod 7 + 1) / 8, whatever comes before; the top list starts with it. A prompt that starts with
"hang" stops after one token until it is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import uuid
from collections.abc import AsyncGenerator

import httpx

from jserve.config import Config
from jserve.engine.ranges import check_ranges
from jserve.errors import EngineDeadError, QueueFullError, RequestError
from jserve.metrics import Metrics
from jserve.server.app import create_app
from jserve.tokenizer.stop_regex import check_stop_regexes
from jserve.types import (
    ControlReply,
    FinishReason,
    GenerateRequest,
    ModelConfig,
    Output,
    RopeConfig,
    TokenLogprobs,
    Transcript,
)

BOS, EOS, VOCAB, CONTEXT = 256, 257, 260, 200


class ByteTokenizer:
    """One id a byte; 256 and 257 are special tokens."""

    vocab_size = VOCAB
    longest_token = 1
    eos_token_ids = (EOS,)
    bos_token_id = BOS
    has_chat_template = True

    def __init__(self):
        self.rendered = []  # (messages, options) of each apply_chat_template

    def encode(self, text, add_special=True):
        return [BOS] * add_special + list(text.encode())

    def decode(self, ids, skip_special_tokens=True, spaces_between_special_tokens=True):
        if skip_special_tokens:
            ids = [one for one in ids if one < 256]
        return b"".join(self.id_to_bytes(one) for one in ids).decode(errors="replace")

    def pieces(self, ids, skip_special_tokens):
        return [b"" if skip_special_tokens and i >= 256 else self.id_to_bytes(i) for i in ids]

    def id_to_text(self, token_id):
        return self.id_to_bytes(token_id).decode(errors="replace")

    def id_to_bytes(self, token_id):
        return bytes([token_id]) if token_id < 256 else f"<{token_id}>".encode()

    def apply_chat_template(self, messages, **options):
        self.rendered.append((messages, options))
        text = "".join(f"{one['role']}:{one['content']}\n" for one in messages)
        return list((text + "assistant:" * options["add_generation_prompt"]).encode())


def chosen(prompt_ids, position, index=0):
    return ord("a") + (sum(prompt_ids) + position + index) % 26


def logprob(token_id):
    return -(token_id % 7 + 1) / 8


def logprobs_of(ids, params, first_is_null=False):
    top = [
        [(logprob(t), t), *((-9.0 - k, (t + k) % 256) for k in range(1, params.top_num))]
        for t in ids
    ]
    rows = [[logprob(t) for t in params.token_ids] for _ in ids]
    table = TokenLogprobs(
        token_ids=list(ids),
        values=[logprob(t) for t in ids],
        top=top if params.top_num else [],
        ids=rows if params.token_ids else [],
    )
    if first_is_null and ids:
        for column in (table.values, table.top, table.ids):
            column[:1] = [None] * len(column[:1])
    return table


class FakeEngine:
    def __init__(self, config: Config):
        self.config = config
        self.tokenizer = ByteTokenizer()
        self.model_config = ModelConfig(
            architecture="FakeForCausalLM",
            vocab_size=VOCAB,
            hidden_size=1,
            intermediate_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            rms_norm_eps=1e-6,
            max_position=CONTEXT,
            rope=RopeConfig(theta=1e4),
            model_type="fake",
        )
        self.sampling_defaults = {}
        self.server_info = {
            "context_length": CONTEXT,
            "max_total_num_tokens": 4096,
            "page_size": 16,
        }
        self.gauges = {"num_running_reqs": 2.0, "num_queue_reqs": 1.0, "num_used_tokens": 48.0}
        self.metrics = Metrics("jserve", "fake")
        self.meter = self.metrics.meter
        self.healthy = True
        self.busy = False  # flush_cache fails
        self.queue_full = False
        self.requests: list[GenerateRequest] = []
        self.open: dict[str, asyncio.Event] = {}  # set: aborted
        self.closed: list[str] = []  # ended before their last Output
        self.aborts = []
        self.controls = []  # (op, arguments) that were asked
        self.paused = False  # generation would never come back
        self.hangs = False  # no question is answered

    @property
    def ranks(self):
        return [(0, self.gauges, self.server_info)]

    async def generate_stream(self, req: GenerateRequest) -> AsyncGenerator[Output, None]:
        self.requests.append(req)
        rid = req.rid or uuid.uuid4().hex
        prompt_ids = self._check(req)
        if rid in self.open:
            raise RequestError(f"rid {rid} is in use.", "rid")
        self.open[rid] = asyncio.Event()
        done = False
        try:
            for index in range(req.sampling.n):
                async for output in self._sequence(req, rid, prompt_ids, index):
                    if req.stream or output.finish is not None:
                        yield output
            done = True
        finally:
            del self.open[rid]
            if not done:
                self.closed.append(rid)

    async def generate_batch(self, reqs):
        queue, base, tasks = asyncio.Queue(), 0, []

        async def pump(req, base):
            try:
                async with contextlib.aclosing(self.generate_stream(req)) as outputs:
                    async for output in outputs:
                        output.index += base
                        queue.put_nowait(output)
                queue.put_nowait(None)
            except Exception as error:  # raised by who reads
                queue.put_nowait(error)

        for req in reqs:
            tasks.append(asyncio.create_task(pump(req, base)))
            base += req.sampling.n
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                running -= item is None
                if item is not None:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, req):
        if not self.healthy:
            raise EngineDeadError("the engine process ended with exit code -9")
        if self.queue_full:
            raise QueueFullError("The request queue is full.")
        field = "text" if req.input_ids is None else "input_ids"
        prompt_ids = (
            self.tokenizer.encode(req.text, req.add_special)
            if req.input_ids is None
            else req.input_ids
        )
        check_ranges(req.sampling, VOCAB)
        check_stop_regexes(req.sampling.stop_regex)
        wanted = req.sampling.max_new_tokens or 0
        if not prompt_ids:
            raise RequestError(f"{field} must hold at least one token.", field)
        if len(prompt_ids) >= CONTEXT:
            raise RequestError(
                f"The prompt has {len(prompt_ids)} tokens, but the context length is {CONTEXT}.",
                field,
            )
        if len(prompt_ids) + wanted > CONTEXT:
            raise RequestError(
                f"max_new_tokens is too large: {wanted} of {CONTEXT}.", "max_new_tokens"
            )
        if req.logprobs is not None and not -1 <= req.logprobs.start_len <= len(prompt_ids):
            raise RequestError("logprob_start_len is beyond the prompt.", "logprob_start_len")
        return prompt_ids

    async def _sequence(self, req, rid, prompt_ids, index):
        sampling, text, ids = req.sampling, "", []
        hang = bytes(t for t in prompt_ids if t < 256).startswith(b"hang")
        limit = (
            CONTEXT - len(prompt_ids)
            if sampling.max_new_tokens is None
            else sampling.max_new_tokens
        )
        finish = FinishReason(type="length", length=0) if limit == 0 else None
        while True:
            new_ids = []
            if finish is None:
                new_ids = [chosen(prompt_ids, len(ids), index)]
                ids = ids + new_ids
            before, text = text, self.tokenizer.decode(ids)
            if len(ids) == limit:
                finish = FinishReason(type="length", length=limit)
            for stop in sampling.stop:
                if stop in text:
                    finish, text = FinishReason(type="stop", matched=stop), text[: text.index(stop)]
            if ids and ids[-1] in sampling.stop_token_ids:
                finish = FinishReason(type="stop", matched=ids[-1])
            yield self._output(
                req, rid, prompt_ids, index, text, text[len(before) :], ids, new_ids, finish
            )
            if finish is not None:
                return
            await asyncio.sleep(0)
            if hang:
                await self.open[rid].wait()
                if not self.healthy:
                    raise EngineDeadError("the engine process ended with exit code -9")
                finish = FinishReason(type="abort", message="aborted by the client")

    def _output(self, req, rid, prompt_ids, index, text, delta, ids, new_ids, finish):
        params = req.logprobs
        start = params.start_len if params else -1
        if params and req.sampling.max_new_tokens == 0:
            start = max(start, 0)
        scored = prompt_ids[start:] if start >= 0 else []
        own = rid if req.sampling.n == 1 else f"{rid}_{index}"
        said = Transcript(
            ids=ids,
            text=io.StringIO(text),
            logprobs=params and logprobs_of(ids, params),
            input_logprobs=params and logprobs_of(scored, params, first_is_null=start == 0),
        )
        return Output(
            index=index,
            rid=own,
            transcript=said,
            text_len=len(text),
            delta=delta,
            new_ids=new_ids,
            finish=finish,
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(ids),
            cached_tokens=3,
            prompt_ids=prompt_ids,
        )

    async def control(self, op, **args):
        self.controls.append((op, args))
        if not self.healthy:
            raise EngineDeadError("the engine process ended with exit code -9")
        if self.hangs:
            await asyncio.Event().wait()
        if op == "flush_cache":
            return ControlReply(id="1", ok=not self.busy, message="busy" if self.busy else "")
        state = {"token_usage": 0.25, "paused": self.paused, "num_running_reqs": len(self.open)}
        return ControlReply(id="1", ok=True, payload=state)

    def abort(self, rid="", abort_all=False):
        self.aborts.append((rid, abort_all))
        for one, event in self.open.items():
            if abort_all or one.startswith(rid):
                event.set()

    def die(self):
        self.healthy = False
        for event in self.open.values():
            event.set()

    def shutdown(self):
        self.healthy = False


class Api:
    """An app on a fake engine; `call` sends one request through ASGI."""

    def __init__(self, **flags):
        self.config = Config.from_flags(**{"model_path": "fake/model", **flags})
        self.engine = FakeEngine(self.config)
        self.app = create_app(self.engine, self.config)

    def call(self, method, path, strict=True, **options):
        async def send():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=strict)
            async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def post(self, path, **body):
        return self.call("POST", path, json=body)

    def ok(self, path, **body):
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path, **body):
        """The JSON of each SSE event; the framing is checked on the way."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        assert all(line.startswith("data: {") and "\n" not in line for line in lines[:-2])
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def expected(prompt_ids, count, index=0):
    return "".join(chr(chosen(prompt_ids, i, index)) for i in range(count))
