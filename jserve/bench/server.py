"""What a benchmark wants of a server beside answers: that it is ready, what it says of itself, an
empty cache, and its tokenizer when that is on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from jserve.errors import ConfigError, JserveError
from jserve.tokenizer.loader import load_tokenizer
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.weights.checkpoint import Checkpoint, is_here, resolve_path


async def await_ready(client: httpx.AsyncClient, timeout: float) -> None:
    """Raises JserveError when the server does not answer /health within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    reason, told = "", False
    while True:
        try:
            reply = await client.get("/health", timeout=10)
            if reply.status_code == 200:
                return
            reason = f"/health answers {reply.status_code}"
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
        if time.monotonic() > deadline:
            raise JserveError(f"no server is ready at {client.base_url}: {reason}")
        if not told:
            print(f"waiting for {client.base_url}: {reason}", file=sys.stderr)
            told = True
        await asyncio.sleep(0.5)


async def server_info(client: httpx.AsyncClient) -> dict[str, Any]:
    """What /server_info says; nothing for servers that have none."""
    try:
        reply = await client.get("/server_info", timeout=60)
        said = reply.json() if reply.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):  # it is not JSON, or not text
        said = None
    if not isinstance(said, dict):
        print(f"{client.base_url}: /server_info is no JSON object, so not used", file=sys.stderr)
        return {}
    return said


async def served_name(client: httpx.AsyncClient, info: Mapping[str, Any]) -> str:
    """The model's name in the API: by /server_info, else the first of /v1/models."""
    name = info.get("served_model_name") or info.get("model_path")
    if not isinstance(name, str):
        with contextlib.suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
            reply = await client.get("/v1/models", timeout=60)
            name = reply.json()["data"][0]["id"]
    return name if isinstance(name, str) else "default"


async def flush_cache(client: httpx.AsyncClient, path: str, timeout: float) -> None:
    """Raises JserveError when the server has no such route, or does not flush."""
    try:
        reply = await client.post(path, params={"timeout": timeout})
        said = f"{reply.status_code}: {reply.text[:200].strip()}"
        done = reply.status_code == 200
    except httpx.HTTPError as error:
        said, done = str(error) or type(error).__name__, False
    if not done:
        raise JserveError(
            f"--flush-cache: {path} of {client.base_url} answers {said}; leave the flag out to "
            "measure with what is cached"
        )


def accept_length(info: Mapping[str, Any]) -> float | None:
    """Tokens a step of speculative decoding, of a server that has it."""
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states else info
    return state.get("avg_spec_accept_length") if isinstance(state, dict) else None


def find_tokenizer(
    path: str | None, model: str | None, info: Mapping[str, Any]
) -> Tokenizer | None:
    """The one at `path`; else of `model`, else the server's by its /server_info, when on this
    machine; else None.

    Raises ConfigError when `path` has none.
    """
    if path is not None:
        try:
            return _load(path, None)
        except ConfigError as error:
            raise ConfigError(f"--tokenizer: {error}") from None
    template = info.get("chat_template")
    sources = (model, info.get("tokenizer_path") or info.get("model_path"))
    here = [source for source in sources if isinstance(source, str) and is_here(source)]
    if not here:
        return None
    try:
        return _load(here[0], template if isinstance(template, str) else None)
    except (ConfigError, OSError) as error:
        print(f"no tokenizer: {error}; give one with --tokenizer PATH", file=sys.stderr)
        return None


def _load(path: str, template: str | None) -> Tokenizer:
    """By the tokenizer's own files: its model need not be here."""
    place = resolve_path(path, None, False, "tokenizer")
    bare = Checkpoint("dummy", Path(place), {}, {})
    return load_tokenizer(bare, path, template)
