"""What a router hears of the cache: which blocks (pages) it holds, named by hashes of all tokens up
to their end. Owns the records, in their order on the wire, and the hashes; sends nothing.

    hash(page) = SHA-256(hash of the page before, or the namespace's seed | its tokens as int32)

On the wire a hash is the first 16 hex digits of that as a signed 64-bit number.
"""

from __future__ import annotations

import hashlib
import json

import msgspec
import numpy as np

from jserve.cache.radix import Namespace

_DIGEST = 32  # bytes
_UNKNOWN = bytes(_DIGEST)


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A run of blocks behind `parent_block_hash` (None: a prompt's first)."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Blocks that are cached no more."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Nothing is cached."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One message: events in the order in which they happened."""

    ts: float  # time.time()
    events: list[KvEvent]
    attn_dp_rank: int | None = None


def namespace_seed(namespace: Namespace) -> bytes:
    """What the first page's hash continues; empty for requests without extra key and salt."""
    if namespace == (None, None):
        return b""
    return hashlib.sha256(json.dumps(namespace).encode()).digest()


def page_digests(parent: bytes, tokens: np.ndarray, page_size: int) -> list[bytes]:
    """SHA-256 of each whole page of `tokens` (int32), each continuing the one before."""
    data, size, digests = tokens.astype("<i4", copy=False).tobytes(), 4 * page_size, []
    for begin in range(0, len(data) - size + 1, size):
        parent = hashlib.sha256(parent + data[begin : begin + size]).digest()
        digests.append(parent)
    return digests


def block_hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


class EventRecorder:
    """Makes the events of one tree's changes. Remembers each cached page's digest, by its id.

    When changes were left out, `cleared` stands for them: what was stored before it is unknown, and
    nothing is told of it, nor of what continues it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._digests = bytearray(num_pages * _DIGEST)  # zeros: unknown

    def stored(
        self, parent: np.ndarray, tokens: np.ndarray, pages: np.ndarray, namespace: Namespace
    ) -> KvEvent | None:
        """Arguments as Observer has them."""
        before = self._digest(int(parent[0])) if len(parent) else None
        if before == _UNKNOWN:
            for page in pages.tolist():
                self._remember(page, _UNKNOWN)
            return None
        seed = namespace_seed(namespace) if before is None else before
        digests = page_digests(seed, tokens, self._page_size)
        for page, digest in zip(pages.tolist(), digests, strict=True):
            self._remember(page, digest)
        return BlockStored(
            block_hashes=[block_hash(digest) for digest in digests],
            parent_block_hash=None if before is None else block_hash(before),
            token_ids=tokens.tolist(),
            block_size=self._page_size,
            medium="GPU",
            cache_salt=namespace[1],
        )

    def removed(self, pages: np.ndarray) -> KvEvent | None:
        digests = [self._digest(page) for page in pages.tolist()]
        hashes = [block_hash(digest) for digest in digests if digest != _UNKNOWN]
        return BlockRemoved(block_hashes=hashes, medium="GPU") if hashes else None

    def cleared(self) -> KvEvent:
        self._digests = bytearray(len(self._digests))
        return AllBlocksCleared()

    def _remember(self, page: int, digest: bytes) -> None:
        self._digests[page * _DIGEST : (page + 1) * _DIGEST] = digest

    def _digest(self, page: int) -> bytes:
        return bytes(self._digests[page * _DIGEST : (page + 1) * _DIGEST])
