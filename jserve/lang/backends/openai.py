"""Programs on OpenAI's API, or on what speaks it.

Owns what that API cannot say, which is refused in words: a chat model answers whole messages only,
nothing can be scored, nothing is cached on purpose.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import httpx

from jserve.lang.backends.base import (
    Committed,
    Generation,
    Prompt,
    Selection,
    Usage,
    check_greedy,
)
from jserve.lang.backends.fits import fit_of
from jserve.lang.backends.wire import JSON, encoded, server_url, told
from jserve.lang.choices import ChoicesDecision, ChoicesMethod
from jserve.lang.errors import BackendError, ExpressionError
from jserve.lang.loop import LoopThread
from jserve.lang.named_templates import named_template
from jserve.lang.roles import RoleTemplate
from jserve.lang.sampling import Sampling

_URL = "https://api.openai.com/v1"
_CONNECT_SECONDS = 10.0
_FORCE = 100  # logit_bias that leaves only the tokens which have it
#: What that API cannot say, and the value that asks for nothing.
_NOT_HERE = {
    "return_logprob": False,
    "spaces_between_special_tokens": True,
    "stream_interval": None,
}
_COMPLETION_MODELS = ("instruct", "davinci", "babbage")


class OpenAI:
    """A model of OpenAI's API.

    Args:
        model_name: as the API calls it.
        is_chat_model: chat or text completions; None: by the name.
        chat_template: template's name for `text()` of a chat model, and for roles in the prompts of
            a completion model. A chat model's own is applied by the API.
        base_url, api_key: None: of the environment (OPENAI_BASE_URL, OPENAI_API_KEY).
        encode: the model's tokenizer, text → ids; `select` needs it.

    Raises ExpressionError for what is no name or no address.
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        if not isinstance(model_name, str):
            raise ExpressionError(f"model_name must be a text, got {model_name!r}.")
        self.loop = LoopThread()
        self._model, self._encode = model_name, encode
        instruct = any(word in model_name for word in _COMPLETION_MODELS)
        self.is_chat_model = not instruct if is_chat_model is None else is_chat_model
        self._template = named_template(chat_template or "default")
        key = api_key or os.environ.get("OPENAI_API_KEY", "")
        given = base_url or os.environ.get("OPENAI_BASE_URL", _URL)
        self._url = server_url("base_url", given)
        self._client = httpx.AsyncClient(
            base_url=self._url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def template(self) -> RoleTemplate:
        return self._template

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        fit, (path, fields) = fit_of(sampling), self._request(prompt, sampling)
        async with self._reply(path, fields) as reply:
            body = json.loads(await reply.aread())
        for choice in body["choices"]:
            _check_ended(choice)
        texts = [self._text(choice, "message") for choice in body["choices"]]
        if fit is not None:
            for choice, text in zip(body["choices"], texts, strict=True):
                fit.check(text, choice.get("finish_reason"))
        usage = _usage(body)
        metas = [_meta(choice, usage) for choice in body["choices"]]
        if sampling.n == 1:
            return Generation(texts[0], metas[0], usage)
        return Generation(texts, metas, usage)

    async def generate_stream(
        self, prompt: Prompt, sampling: Sampling
    ) -> AsyncGenerator[Generation, None]:
        fit, (path, fields) = fit_of(sampling), self._request(prompt, sampling)
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        finish: dict[str, Any] = {}
        texts: list[str] = []
        async with self._reply(path, fields | streamed) as reply:
            async for line in reply.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                body = json.loads(data)
                if "error" in body:
                    raise BackendError(f"POST {path}: {body['error'].get('message')}")
                if body["choices"]:
                    finish = body["choices"][0]
                    _check_ended(finish)
                    texts.append(self._text(finish, "delta"))
                    yield Generation(texts[-1], _meta(finish, Usage()), Usage())
                elif body.get("usage"):
                    usage = _usage(body)
                    yield Generation("", _meta(finish, usage), usage)
        if fit is not None:
            fit.check("".join(texts), finish.get("finish_reason"))

    async def select(
        self, prompt: Prompt, choices: Sequence[str], temperature: float, method: ChoicesMethod
    ) -> Selection:
        """Token by token the likeliest that one of the choices goes on with; `method` does not
        count, because the API scores nothing, and a choice that begins another loses to it."""
        check_greedy(temperature)
        if self.is_chat_model or self._encode is None:
            what = "a completion model" if self.is_chat_model else "encode=, the model's tokenizer"
            raise BackendError(f"select through OpenAI's API needs {what}")
        alive = {choice: list(self._encode(choice)) for choice in choices}
        said, usage, at = "", Usage(), 0
        while len(alive) > 1:
            following = {ids[at] for ids in alive.values() if at < len(ids)}
            sampling = Sampling(max_new_tokens=1, temperature=0.0).resolved()
            fields = {"model": self._model, "prompt": prompt.text + said, **sampling.to_openai()}
            fields["logit_bias"] = {str(token): _FORCE for token in following}
            async with self._reply("/completions", fields) as reply:
                body = json.loads(await reply.aread())
            _check_ended(body["choices"][0])
            usage, at = usage + _usage(body), at + 1
            said += body["choices"][0]["text"]
            alive = {one: ids for one, ids in alive.items() if one.startswith(said)}
        if not alive:
            raise BackendError(f"the API answers {said!r}, with which no choice begins")
        return Selection(ChoicesDecision(next(iter(alive)), {"method": "greedy by bias"}), usage)

    async def commit(self, prompt: Prompt) -> Committed:
        return Committed(Usage())  # the API keeps what it likes

    def get_model_name(self) -> str:
        return self._model

    def flush_cache(self) -> bool:
        return False

    def get_server_info(self) -> dict[str, Any]:
        return {"model_path": self._model}

    def shutdown(self) -> None:
        self.loop.close(self._client.aclose)

    def _request(self, prompt: Prompt, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        for name, idle in _NOT_HERE.items():
            if getattr(sampling, name) not in (None, idle):
                raise BackendError(f"{name} is for engines and their servers, not OpenAI's API")
        fields = {"model": self._model, **sampling.to_openai()}
        if not self.is_chat_model:
            return "/completions", fields | {"prompt": prompt.text}
        if prompt.role != "assistant" or prompt.opened:
            raise BackendError(
                "a chat model of OpenAI's API answers with whole messages: gen must directly "
                "follow the beginning of the assistant's role"
            )
        messages = [dict(message) for message in prompt.messages]
        return "/chat/completions", fields | {"messages": messages}

    def _text(self, choice: Mapping[str, Any], part: str) -> str:
        return (choice[part].get("content") if self.is_chat_model else choice["text"]) or ""

    @contextlib.asynccontextmanager
    async def _reply(
        self, path: str, fields: Mapping[str, Any]
    ) -> AsyncGenerator[httpx.Response, None]:
        """Raises BackendError."""
        sent = {"content": encoded(dict(fields)), "headers": JSON}
        with told(f"POST {path}", self._url):
            async with self._client.stream("POST", path, **sent) as reply:
                if reply.is_error:
                    text = (await reply.aread()).decode(errors="replace")
                    raise BackendError(f"POST {path} → {reply.status_code}: {text}")
                yield reply


def _usage(body: Mapping[str, Any]) -> Usage:
    usage = body.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        int(usage.get("prompt_tokens") or 0),
        int(details.get("cached_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
        num_calls=1,
    )


def _check_ended(choice: Mapping[str, Any]) -> None:
    """Raises BackendError for an answer that the server took back or broke off."""
    reason = choice.get("finish_reason")
    if reason == "abort":
        why = choice.get("abort_message") or "no reason given"
        raise BackendError(f"the request was aborted: {why}")
    if reason == "content_filter":
        raise BackendError("the API's content filter ended the answer (finish_reason)")


def _meta(choice: Mapping[str, Any], usage: Usage) -> dict[str, Any]:
    reason = choice.get("finish_reason")
    finish = None if reason is None else {"type": reason, "matched": choice.get("matched_stop")}
    return {
        "finish_reason": finish,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    }
