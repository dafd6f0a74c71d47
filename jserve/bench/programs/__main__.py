"""Run the programs on a server, or on an engine in this process: what they answer and reuse.

python -m jserve.bench.programs few-shot rag --model-path smollm2-135m
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jserve.lang as sgl
from jserve.bench.programs import PROGRAMS, Work
from jserve.errors import JserveError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jserve.bench.programs", description=__doc__)
    parser.add_argument("programs", nargs="*", metavar="NAME", help=", ".join(PROGRAMS))
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="a running server")
    where.add_argument("--model-path", default="smollm2-135m", help="[smollm2-135m]")
    parser.add_argument("--scale", type=int, default=1, help="examples and texts, times over [1]")
    parsed = parser.parse_args(argv)
    if parsed.scale < 1:
        parser.error(f"--scale must be >= 1, got {parsed.scale}")
    if unknown := set(parsed.programs) - set(PROGRAMS):
        parser.error(f"no program is called {min(unknown)}; there are {', '.join(PROGRAMS)}")
    works = [PROGRAMS[name].scaled(parsed.scale) for name in parsed.programs or PROGRAMS]
    try:
        if parsed.url:
            backend = sgl.RuntimeEndpoint(parsed.url)
            for work in works:
                show(work, backend)
            backend.shutdown()
        else:
            with sgl.Engine(model_path=parsed.model_path) as engine:
                for work in works:
                    show(work, engine)
    except JserveError as error:
        print(f"jserve: {error}", file=sys.stderr)
        return 1
    return 0


def show(work: Work, backend: Any) -> None:
    """Run all items of a program as a batch and print what came of it."""
    print(f"{work.name}: {work.about}")
    before = _prefill_tokens(backend)
    states = work.program.run_batch(work.items, backend=backend, temperature=0)
    total = sgl.Usage()
    for state in states:
        if (error := state.error()) is not None:
            raise error
        total += state.usage
        print(f"  {work.answer(state)!r}")
    computed = _prefill_tokens(backend) - before  # the prefix that all share is in it
    print(
        f"  {len(states)} programs, {total.num_calls} calls: {total.cached_tokens} prompt tokens "
        f"reused, {computed} computed, {total.completion_tokens} generated"
    )


def _prefill_tokens(backend: Any) -> int:
    """Prompt tokens that the engine has computed so far."""
    info = sgl.get_server_info(backend) or {}
    state = info["internal_states"][0] if "internal_states" in info else info
    return int(state["prefill_tokens_total"])


if __name__ == "__main__":
    sys.exit(main())
