"""Programs on a server that speaks SGLang's native HTTP API: jserve's own, or SGLang's."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

from jserve.errors import RequestError
from jserve.lang.backends.native import NativeBackend
from jserve.lang.backends.wire import JSON, encoded, server_url, told
from jserve.lang.errors import BackendError, RefusedError
from jserve.lang.named_templates import name_for_model, named_template
from jserve.lang.roles import Messages, RoleTemplate

_CONNECT_SECONDS = 10.0  # an answer itself may take as long as it takes


class RuntimeEndpoint(NativeBackend):
    """A running server.

    Args:
        base_url: as http://127.0.0.1:30000.
        api_key: the server's bearer key.
        verify: whether, or by which CA file, the server's certificate is checked.
        chat_template_name: one of SGLang's templates by name. Without it the server's own, where it
            shows it (jserve does), else the one that the model's name suggests.

    Raises ExpressionError for what is no address, BackendError when no server answers there.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: bool | str | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        if chat_template_name is not None:
            named_template(chat_template_name)  # a wrong name is told at once
        self.base_url, self.api_key = server_url("base_url", base_url), api_key
        self._http = HttpTransport(self.base_url, api_key, verify, chat_template_name)
        super().__init__(self._http)
        try:
            self.model_info: dict[str, Any] = self.loop.call(self._http.model_info())
        except BaseException:
            self.shutdown()
            raise


class HttpTransport:
    """native.py's Transport over HTTP."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        verify: bool | str | None = None,
        template_name: str | None = None,
    ) -> None:
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            verify=_context(verify),
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._url, self._template_name = url, template_name

    async def generate(self, fields: Mapping[str, Any]) -> Any:
        return (await self.ask("POST", "/generate", dict(fields))).json()

    async def stream(self, fields: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        content = encoded(dict(fields))
        request = self._client.stream("POST", "/generate", content=content, headers=JSON)
        with told("POST /generate", self._url):
            async with request as reply:
                if reply.is_error:
                    await reply.aread()
                    raise _refused("POST /generate", reply)
                async for line in reply.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data != "[DONE]":
                        yield _event(json.loads(data))

    async def template(self) -> RoleTemplate:
        """The server's own: its /tokenize renders messages, its /detokenize shows the text."""
        if self._template_name is not None:
            return named_template(self._template_name)

        async def render(messages: Messages, opened: bool) -> str:
            try:
                return await self._shown(messages=list(messages), add_generation_prompt=opened)
            except RefusedError as error:
                raise RequestError(str(error), "messages") from error

        template = RoleTemplate(render)
        try:
            if await self._takes_add_generation_prompt():
                await template.begin(template.none, "user")
                return template
        except RequestError:
            pass
        info = await self.model_info()
        return named_template(name_for_model(str(info.get("model_path", ""))))

    async def special_prefix(self) -> str:
        try:
            return await self._shown(prompt="")
        except RefusedError:
            return ""  # a server that does not tell: named templates do not begin with it either

    async def encode(self, text: str) -> list[int]:
        return (await self.ask("POST", "/tokenize", {"prompt": text})).json()["tokens"]

    async def page_size(self) -> int:
        return int((await self.server_info()).get("page_size") or 1)

    async def _takes_add_generation_prompt(self) -> bool:
        """A server that does refuses nonsense there; one that ignores the field lets it pass."""
        message = {"role": "user", "content": "?"}
        try:
            await self._shown(messages=[message], add_generation_prompt="?")
        except RefusedError:
            return True
        return False

    async def _shown(self, **fields: Any) -> str:
        """The text whose tokens the server makes of these fields of /tokenize."""
        tokens = (await self.ask("POST", "/tokenize", fields)).json()["tokens"]
        if not tokens:
            return ""
        body = {"tokens": tokens, "skip_special_tokens": False}
        return (await self.ask("POST", "/detokenize", body)).json()["text"]

    async def model_info(self) -> dict[str, Any]:
        return (await self.ask("GET", "/get_model_info")).json()

    async def server_info(self) -> dict[str, Any]:
        return (await self.ask("GET", "/get_server_info")).json()

    async def flush_cache(self) -> bool:
        with told("POST /flush_cache", self._url):
            return (await self._client.post("/flush_cache")).is_success

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """One exchange. Raises BackendError."""
        sent = {} if body is None else {"content": encoded(body), "headers": JSON}
        with told(f"{method} {path}", self._url):
            reply = await self._client.request(method, path, **sent)
        if reply.is_error:
            raise _refused(f"{method} {path}", reply)
        return reply


def _context(verify: bool | str | None) -> Any:
    if isinstance(verify, str):
        return httpx.create_ssl_context(verify)
    return True if verify is None else verify


def _refused(what: str, reply: httpx.Response) -> RefusedError:
    try:
        body = reply.json()
        error = body.get("error", body)
        message = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = reply.text
    return RefusedError(f"{what} → {reply.status_code}: {message}")


def _event(body: dict[str, Any]) -> dict[str, Any]:
    if "error" in body:
        raise BackendError(f"POST /generate: {body['error'].get('message')}")
    return body
