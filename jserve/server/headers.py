"""Headers that few requests have: a type that is spelt otherwise, a packed body, a rank, labels.

Called only where one is there. Refuses to know what a body holds and which ranks there are.
"""

from __future__ import annotations

import asyncio
import re
import zlib

from starlette.requests import Request

from jserve.errors import MediaError, RequestError

RANK = "x-data-parallel-rank"
_LABELS, _PACKING = "x-custom-labels", "Content-Encoding"
#: Of requests that generate.
RARE = frozenset((RANK, _LABELS))
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # of zlib, with the container's kind


def check_type(kind: str, path: str) -> None:
    """Raises RequestError unless a Content-Type says JSON, or outside /v1 nothing."""
    if not kind.endswith("+json") and (kind or path.startswith("/v1")):
        raise RequestError(f"Content-Type must be application/json, got {kind or 'none'}.")


def check_rare(request: Request) -> None:
    """Raises RequestError for labels, and for another rank than the only one that there is."""
    labels = request.headers.get(_LABELS, "").strip()
    if labels not in ("", "{}"):
        raise RequestError(f"The header {_LABELS} is not supported yet; leave it out.", _LABELS)
    named = request.headers.get(RANK)  # of several, ranked.py has put it into the scope
    if named is not None and "routed_dp_rank" not in request.scope and rank_of(named) != 0:
        only = "this server has one data-parallel rank, which --dp-size is for"
        raise RequestError(f"{RANK} must be 0: {only}.", RANK)


def rank_of(text: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text):  # int() takes no more than 4300
        raise RequestError(f"{RANK} must be the number of a rank, got {text!r}.", RANK)
    return int(text)


async def unpacked(body: bytes, packing: str, most: int) -> bytes:
    """A body as it was before its Content-Encoding; of a longer one the first `most` bytes. Off
    the event loop: a few bytes may hold many. Raises MediaError or RequestError."""
    names = {name.strip().lower() for name in packing.split(",")} - {"", "identity"}
    if not names:
        return body
    if len(names) > 1 or not names <= _WINDOW_BITS.keys():
        known = ", ".join(_WINDOW_BITS)
        raise MediaError(f"{_PACKING} must be one of {known}, got {packing!r}; or leave it out.")
    return await asyncio.to_thread(_inflated, body, names.pop(), most)


def _inflated(body: bytes, packing: str, most: int) -> bytes:
    stream, named = zlib.decompressobj(_WINDOW_BITS[packing]), f"the {packing} of {_PACKING}"
    try:
        whole = stream.decompress(body, most)
    except zlib.error as error:
        raise RequestError(f"The body is not {named}: {error}.") from None
    if len(whole) < most and not (stream.eof and not stream.unused_data):
        wrong = "goes on after its end" if stream.eof else "ends too early"
        raise RequestError(f"The body is not {named}: it {wrong}.")
    return whole
