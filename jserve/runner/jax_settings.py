"""JAX's settings of this process, which belong to who runs an engine in it: pinned while programs
are traced, given back when an engine ends. Knows no programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

_OF_THE_CACHE = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """In this thread: those that decide what a program computes are JAX's own defaults, whatever
    the process has. What is compiled then runs under any."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.default_prng_impl("threefry2x32"),
        jax.threefry_partitionable(True),
    ):
        yield


def cache_restorer(folder: str | None) -> Callable[[], None]:
    """What gives the process its own compilation cache back, as it is set now; does nothing where
    it is not that of `folder` any more."""
    before = {name: getattr(jax.config, name) for name in _OF_THE_CACHE}

    def restore() -> None:
        if folder is None or getattr(jax.config, _OF_THE_CACHE[0]) != folder:
            return
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # the next compilation opens the folder that is set

    return restore
