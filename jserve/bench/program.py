"""`jserve bench program`: what a program saves against the same calls without its structure.

Three arms on one engine: every call a request of its own that finds nothing in the cache; the same
with the cache; and the program as it is. Owns arms and figures; the programs are in programs/.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from jserve.bench.flat import FlatTransport
from jserve.bench.programs import PROGRAMS, Work
from jserve.engine.engine import Engine
from jserve.errors import ConfigError, JserveError
from jserve.lang import EngineBackend
from jserve.lang.backends.engine import EngineTransport
from jserve.lang.backends.native import NativeBackend

ARMS = ("flat", "flat-radix", "program")


def chosen(names: Sequence[str] | None, num_items: int | None = None, scale: int = 1) -> list[Work]:
    """The programs of these names, on so many of their items. Raises ConfigError."""
    unknown = [name for name in names or () if name not in PROGRAMS]
    if unknown:
        raise ConfigError(f"--programs knows {', '.join(PROGRAMS)}, got {unknown[0]}")
    if num_items is not None and num_items < 1:
        raise ConfigError(f"--items must be >= 1, got {num_items}")
    if scale < 1:
        raise ConfigError(f"--scale must be >= 1, got {scale}")
    works = [PROGRAMS[name].scaled(scale) for name in names or PROGRAMS]
    return [dataclasses.replace(work, items=work.items[:num_items]) for work in works]


def compare_work(engine: Engine, work: Work, repeat: int) -> dict[str, Any]:
    """All arms of one program; the best time of `repeat` runs of each counts."""
    arms = {name: _run(engine, work, name, repeat) for name in ARMS}
    flat, radix, program = (arms[name] for name in ARMS)
    answers = [arm.pop("answers") for arm in (flat, radix, program)]
    return {
        "name": work.name,
        "items": len(work.items),
        "arms": arms,
        "prefill_ratio": program["prefill_tokens"] / flat["prefill_tokens"],
        "prefill_ratio_to_radix": program["prefill_tokens"] / radix["prefill_tokens"],
        "speedup": flat["wall_seconds"] / program["wall_seconds"],
        "speedup_to_radix": radix["wall_seconds"] / program["wall_seconds"],
        "different_answers": sum(len(set(one)) > 1 for one in zip(*answers, strict=True)),
    }


def _run(engine: Engine, work: Work, arm: str, repeat: int) -> dict[str, Any]:
    """Raises what ended a program."""
    best: dict[str, Any] = {}
    for _ in range(repeat):
        if not engine.flush_cache(timeout=30):
            raise JserveError("the engine does not come to rest")
        backend = _BACKENDS[arm](engine)
        before, started = _prefill_tokens(engine), time.perf_counter()
        states = work.program.run_batch(work.items, backend=backend, temperature=0)
        seconds = time.perf_counter() - started
        backend.shutdown()
        for state in states:
            if (error := state.error()) is not None:
                raise error
        usages = [state.usage for state in states]
        if not best or seconds < best["wall_seconds"]:
            best = {
                "prefill_tokens": _prefill_tokens(engine) - before,
                "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
                "generated_tokens": sum(usage.completion_tokens for usage in usages),
                "calls": sum(usage.num_calls for usage in usages),
                "wall_seconds": seconds,
                "answers": [work.answer(state) for state in states],
            }
    return best


def _prefill_tokens(engine: Engine) -> int:
    """Prompt tokens that were computed so far."""
    return int(engine.get_server_info()["prefill_tokens_total"])


def _flat(engine: Engine, reuse: bool) -> NativeBackend:
    def count(text: str) -> int:
        return len(engine.tokenizer.encode(text))

    return NativeBackend(FlatTransport(EngineTransport(engine), count, reuse))


_BACKENDS: dict[str, Callable[[Engine], NativeBackend]] = {
    "flat": lambda engine: _flat(engine, False),
    "flat-radix": lambda engine: _flat(engine, True),
    "program": EngineBackend,
}
