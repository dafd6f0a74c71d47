"""A program's calls as SGLang's native requests, whoever carries them.

Owns which requests a call makes and how their bodies become values; a Transport brings them to an
engine in this process or to a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from jserve.engine.misfit import no_prompt
from jserve.lang.backends.base import (
    Committed,
    Generation,
    Prompt,
    Seen,
    Selection,
    Usage,
    check_greedy,
)
from jserve.lang.choices import ChoicesMethod, Scores, heal
from jserve.lang.errors import BackendError
from jserve.lang.loop import LoopThread
from jserve.lang.roles import RoleTemplate
from jserve.lang.sampling import Sampling
from jserve.lang.settings import global_config

_SCORED = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
_NOTHING = {"sampling_params": {"max_new_tokens": 0, "temperature": 0.0}}  # is generated
_SCORE = {"return_logprob": True, "return_text_in_logprobs": True, **_NOTHING}


class Transport(Protocol):
    """The way to one engine. All methods but `close` run on the backend's loop and raise
    JserveError; `fields` are those of /generate."""

    async def generate(self, fields: Mapping[str, Any]) -> Any:
        """One body, or a list of them."""
        ...

    def stream(self, fields: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Bodies, each cumulative."""
        ...

    async def template(self) -> RoleTemplate: ...

    async def special_prefix(self) -> str:
        """Text of the tokens that the engine itself puts before a text."""
        ...

    async def encode(self, text: str) -> list[int]:
        """Ids of a text as the engine itself makes them."""
        ...

    async def page_size(self) -> int:
        """Tokens that are reused together; 1: every token alone, or it is not known."""
        ...

    async def model_info(self) -> dict[str, Any]: ...

    async def server_info(self) -> dict[str, Any]: ...

    async def flush_cache(self) -> bool: ...

    async def close(self) -> None: ...


class NativeBackend:
    """Programs on an engine that speaks SGLang's native API."""

    def __init__(self, transport: Transport) -> None:
        self.loop = LoopThread()
        self._transport = transport
        self._template: asyncio.Task[RoleTemplate] | None = None
        self._prefix: asyncio.Task[str] | None = None
        self._page: asyncio.Task[int] | None = None

    async def template(self) -> RoleTemplate:
        if self._template is None or _failed(self._template):
            self._template = asyncio.ensure_future(self._transport.template())
        return await asyncio.shield(self._template)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        fields = await self._fields(prompt.text, sampling)
        bodies = _listed(await self._transport.generate(fields))
        metas = [_checked(body) for body in bodies]
        texts = [body["text"] for body in bodies]
        if sampling.n == 1:
            return Generation(texts[0], metas[0], usage_of(metas[0]))
        return Generation(texts, metas, sum(map(usage_of, metas), Usage()))

    async def generate_stream(
        self, prompt: Prompt, sampling: Sampling
    ) -> AsyncGenerator[Generation, None]:
        fields = await self._fields(prompt.text, sampling) | {"stream": True}
        length, scored = 0, 0
        async for body in self._transport.stream(fields):
            meta, text = _checked(body), body["text"]
            piece, scored = _piece(meta, scored)
            over = meta.get("finish_reason") is not None
            yield Generation(text[length:], piece, usage_of(meta) if over else Usage())
            length = len(text)

    async def select(
        self, prompt: Prompt, choices: Sequence[str], temperature: float, method: ChoicesMethod
    ) -> Selection:
        """Every choice, scored behind the prompt."""
        check_greedy(temperature)
        text = await self._own(prompt.text)
        length, usage, together = await self._before_choices(text, prompt.seen)
        texts = [text + choice for choice in choices]
        start = {"logprob_start_len": max(length - 2, 0)}
        bodies = (
            await self._transport.generate({"text": texts, **start, **_SCORE})
            if together
            else (
                await asyncio.gather(
                    *(self._transport.generate({"text": one, **start, **_SCORE}) for one in texts)
                )
            )
        )
        metas = [_checked(body) for body in bodies]
        tokens = [heal(prompt.text, meta["input_token_logprobs"]) for meta in metas]
        outputs = [meta.get("output_token_logprobs") or [] for meta in metas]
        alone, more = None, []
        if method.needs_unconditional:
            ids = [[entry[1] for entry in entries] for entries in tokens]
            fields = {"input_ids": ids, "logprob_start_len": 0, **_SCORE}
            more = [_checked(body) for body in await self._transport.generate(fields)]
            alone = [meta["input_token_logprobs"] for meta in more]
        decision = method(Scores(tuple(choices), tokens, outputs, alone))
        return Selection(decision, sum(map(usage_of, [*metas, *more]), usage), length)

    async def _before_choices(self, text: str, seen: Seen) -> tuple[int, Usage, bool]:
        """Compute what choices behind a text will share: its tokens, the cost, and whether they
        should be scored as one batch (SGLang's way; where pages are known, nothing is left that a
        batch would share).
        """
        ids, page = await self._paged(text)
        if page == 1:
            meta = _checked(await self._transport.generate({"text": text, **_NOTHING}))
            return meta["prompt_tokens"], usage_of(meta), True
        if not ids:
            raise no_prompt("text")
        # The first token that is scored is two before the prompt's end; what says how likely it
        # is, the token before it, is computed again.
        shared = max(len(ids) - 3, 0) // page * page
        usage = Usage()
        if shared > seen.tokens // page * page:
            fields = {"input_ids": ids[:shared], **_NOTHING}
            usage = usage_of(_checked(await self._transport.generate(fields)))
        return len(ids), usage, False

    async def commit(self, prompt: Prompt) -> Committed:
        """Where pages are known, whole ones only: no other is reused; and none that was seen."""
        text = await self._own(prompt.text)
        ids, page = await self._paged(text)
        if page == 1:
            meta = _checked(await self._transport.generate({"text": text, **_NOTHING}))
            return Committed(usage_of(meta), meta["prompt_tokens"])
        whole = len(ids) // page * page
        if whole <= prompt.seen.tokens // page * page:
            return Committed(Usage(), prompt.seen.tokens)
        fields = {"input_ids": ids[:whole], **_NOTHING}
        return Committed(usage_of(_checked(await self._transport.generate(fields))), whole)

    async def _paged(self, text: str) -> tuple[list[int], int]:
        """The text's ids and the page size; no ids where pages do not matter."""
        if self._page is None or _failed(self._page):
            self._page = asyncio.ensure_future(self._transport.page_size())
        page = await asyncio.shield(self._page)
        return ([], 1) if page == 1 else (await self._transport.encode(text), page)

    def get_model_name(self) -> str:
        return str(self.loop.call(self._transport.model_info())["model_path"])

    def cache_prefix(self, prefix: str) -> None:
        """Compute a text once, so that prompts that begin with it reuse it."""
        self.loop.call(self.commit(Prompt(prefix)))

    def flush_cache(self) -> bool:
        return self.loop.call(self._transport.flush_cache())

    def get_server_info(self) -> dict[str, Any]:
        return self.loop.call(self._transport.server_info())

    def shutdown(self) -> None:
        """Close the way to the engine, not the engine. Programs under way are cancelled. Later
        calls do nothing."""
        self.loop.close(self._transport.close)

    async def _fields(self, text: str, sampling: Sampling) -> dict[str, Any]:
        params = {
            "skip_special_tokens": global_config.skip_special_tokens_in_output,
            "spaces_between_special_tokens": global_config.spaces_between_special_tokens_in_out,
        } | sampling.to_native()
        fields = {"text": await self._own(text), "sampling_params": params}
        if sampling.return_logprob:
            fields |= {
                "return_logprob": True,
                "logprob_start_len": sampling.logprob_start_len,
                "top_logprobs_num": sampling.top_logprobs_num or 0,
                "return_text_in_logprobs": bool(sampling.return_text_in_logprobs),
            }
        return {name: value for name, value in fields.items() if value is not None}

    async def _own(self, text: str) -> str:
        """Without what the engine will put before it: a chat template begins with it too."""
        if self._prefix is None or _failed(self._prefix):
            self._prefix = asyncio.ensure_future(self._transport.special_prefix())
        prefix = await asyncio.shield(self._prefix)
        return text.removeprefix(prefix) if text != prefix else text


def usage_of(meta: Mapping[str, Any]) -> Usage:
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    return Usage(*(int(meta.get(name) or 0) for name in names), num_calls=1)


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _listed(bodies: Any) -> list[dict[str, Any]]:
    return bodies if isinstance(bodies, list) else [bodies]


def _checked(body: Mapping[str, Any]) -> dict[str, Any]:
    """The meta information. Raises BackendError for an answer that was aborted."""
    meta = body["meta_info"]
    finish = meta.get("finish_reason") or {}
    if finish.get("type") == "abort":
        raise BackendError(f"the request was aborted: {finish.get('message') or 'no reason given'}")
    return meta


def _piece(meta: dict[str, Any], scored: int) -> tuple[dict[str, Any], int]:
    """The meta information with the log-probabilities of what is new; how many have come.

    Servers send all of them in every chunk, or the new ones.
    """
    piece, total = dict(meta), scored
    for name in _SCORED:
        entries = meta.get(name)
        if entries is not None:
            whole = len(entries) == meta.get("completion_tokens")
            piece[name] = entries[scored:] if whole else entries
            total = len(entries) if whole else scored + len(entries)
    return piece, total
