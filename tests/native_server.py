"""A stand-in for SGLang's server, written from the HTTP contract: routes, bodies, streams, errors.

Its tokens are bytes. Token i of an answer is `a` + (sum(prompt) + i) mod 26; the log-probability of
a token is a formula of it, the one before it and its position. Like SGLang's it ignores fields that
it does not know. A prompt that contains "hang" is answered when the client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from jserve.lang.roles import shared_length

TOKENS_A_CHUNK = 2


def answer_of(prompt: str, length: int) -> str:
    return "".join(chr(97 + (sum(prompt.encode()) + i) % 26) for i in range(length))


def logprob(ids: list[int], position: int) -> float | None:
    """None for the first token."""
    if position == 0:
        return None
    return -((ids[position] * 7 + ids[position - 1] * 3 + position) % 11 + 1) / 8


class NativeServer:
    """`requests` holds every body of /generate, `left` counts clients that left."""

    def __init__(self, model_path: str = "stand/in-chat", key: str | None = None) -> None:
        self.model_path, self.key = model_path, key
        self.requests: list[dict] = []
        self.left = 0
        self.seen: list[str] = []
        self.shows_templates = False
        routes = [
            Route("/generate", self.generate, methods=["POST", "PUT"]),
            Route("/get_model_info", self.model_info),
            Route("/get_server_info", self.server_info),
            Route("/flush_cache", self.flush, methods=["GET", "POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def generate(self, request: Request):
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "wrong key"}}, 401)
        body = await request.json()
        self.requests.append(body)
        params = body.get("sampling_params") or {}
        if params.get("top_p", 1) > 1:
            message = "top_p must be in (0, 1], got 2."
            return JSONResponse({"error": {"message": message}}, 400)
        prompts = body.get("text", body.get("input_ids"))
        if body.get("stream"):
            return StreamingResponse(self.chunks(prompts, body), media_type="text/event-stream")
        if "hang" in str(prompts):
            while not await request.is_disconnected():
                await asyncio.sleep(0.005)
            self.left += 1
        many = isinstance(prompts, list) and not isinstance(prompts[0], int)
        answers = [self.answer(one, body) for one in (prompts if many else [prompts])]
        if params.get("n", 1) > 1:
            return JSONResponse(answers * params["n"])
        return JSONResponse(answers if many else answers[0])

    def answer(self, prompt, body, length: int | None = None) -> dict:
        text = prompt if isinstance(prompt, str) else bytes(prompt).decode()
        wanted = (body.get("sampling_params") or {}).get("max_new_tokens", 128)
        said = answer_of(text, wanted if length is None else length)
        cached = max((shared_length(text, seen) for seen in self.seen), default=0)
        finish = {"type": "length", "length": wanted}
        if "abort" in text:
            finish = {"type": "abort", "message": "out of memory", "status_code": 500}
        meta = {
            "id": "x",
            "finish_reason": finish if len(said) == wanted else None,
            "prompt_tokens": len(text),
            "completion_tokens": len(said),
            "cached_tokens": min(cached, len(text) - 1),
        }
        if body.get("return_logprob"):
            ids = list((text + said).encode())
            named = body.get("return_text_in_logprobs")
            entries = [[logprob(ids, i), t, chr(t) if named else None] for i, t in enumerate(ids)]
            start = body.get("logprob_start_len", -1)
            meta["input_token_logprobs"] = entries[start : len(text)] if start >= 0 else []
            meta["output_token_logprobs"] = entries[len(text) :]
        if len(said) == wanted:
            self.seen.append(text + said)
        return {"text": said, "output_ids": list(said.encode()), "meta_info": meta}

    async def chunks(self, prompt, body):
        wanted = body["sampling_params"]["max_new_tokens"]
        for length in [*range(TOKENS_A_CHUNK, wanted, TOKENS_A_CHUNK), wanted]:
            if "break" in prompt and length > TOKENS_A_CHUNK:
                error = {"message": "lost the device", "code": 500}
                yield f"data: {json.dumps({'error': error})}\n\n"
                break
            yield f"data: {json.dumps(self.answer(prompt, body, length))}\n\n"
            await asyncio.sleep(0)
        yield "data: [DONE]\n\n"

    async def model_info(self, request: Request):
        return JSONResponse({"model_path": self.model_path, "is_generation": True})

    async def server_info(self, request: Request):
        return JSONResponse({"version": "stand-in", "num_requests": len(self.requests)})

    async def flush(self, request: Request):
        self.seen.clear()
        return PlainTextResponse("Cache flushed.")

    async def tokenize(self, request: Request):
        body = await request.json()
        text = body.get("prompt")
        if text is None:  # add_generation_prompt is ignored
            text = "".join(f"[{m['role']}]{m['content']}" for m in body["messages"]) + "[assistant]"
        return JSONResponse({"tokens": list(text.encode()), "count": len(text)})

    async def detokenize(self, request: Request):
        return JSONResponse({"text": bytes((await request.json())["tokens"]).decode()})


@contextlib.contextmanager
def running(app) -> Iterator[str]:
    """The app behind uvicorn in a thread; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # a client that is faster than the thread waits and is not refused
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
