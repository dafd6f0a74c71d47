"""From a model and its parameters to what a Runner is made of: the pool's size, the programs and
their order.

What must be compiled before the first step is the least set that serves every step; it is also
what sets the memory that a step needs. The rest makes steps cheaper, and comes in the order in
which plain traffic gains by it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp

from jserve.batch import SlotState
from jserve.cache.pool import KVPool, pool_spec
from jserve.errors import ConfigError
from jserve.plan import Kind
from jserve.runner.buckets import HEADS, Buckets, Key
from jserve.runner.guard import CompileGuard
from jserve.runner.manifest import Manifest, Options, Program
from jserve.runner.memory import DeviceMemory, device_limit, local_bytes, temporary_bytes
from jserve.runner.programs import Programs
from jserve.runner.ranked import for_ranks
from jserve.runner.reach import reached_pages
from jserve.runner.recount import recount_program
from jserve.runner.score import score_program
from jserve.runner.shapes import Model, Shapes, shardings
from jserve.runner.store import ProgramStore
from jserve.runner.window_share import WindowShare
from jserve.types import KVShape
from sharding.rules import Rules

logger = logging.getLogger("jserve.runner")

# A donated pool counts twice in XLA's estimate, so on GPU each program with one would be searched
# in vain for something to recompute, with a warning.
_GPU_OPTIONS: Options = {"xla_disable_hlo_passes": "rematerialization"}
# From SEARCHED_BELOW rows on, cuBLAS's own choice of kernels is the fastest (5% of a decode step at
# 64 and 128 rows), and is made at once: trying them beside other compilations takes 4 times as long
# and can pick wrong (20% of a matmul).
_GPU_LARGE: Options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
SEARCHED_BELOW = 16
# Collectives are launched one by one, between CUDA graphs of what lies between two of them: for
# short runs too (6 to 16% of a decode step on two cards).
_GPU_SPLIT: Options = {"xla_gpu_graph_min_graph_size": 2}


class RunnerSettings(Protocol):
    """What the runner reads of config.Resolved."""

    @property
    def kv_dtype(self) -> str: ...
    @property
    def context_length(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def chunked_prefill_size(self) -> int: ...
    @property
    def max_total_tokens(self) -> int | None: ...
    @property
    def mem_fraction_static(self) -> float: ...
    @property
    def recompile_guard(self) -> str: ...
    @property
    def swa_full_tokens_ratio(self) -> float | None: ...


def compile_programs(
    model: Model,
    params: Mapping[str, jax.Array],
    rules: Rules,
    settings: RunnerSettings,
    progress: Callable[[int, int], None],
    *,
    compilation_cache_dir: str | None = None,
    facts: Sequence[object] = (),
    host_bytes: int | None = None,
) -> tuple[Programs, Mapping[str, jax.Array], Manifest, CompileGuard, int]:
    """Size the pool and compile: what a Runner is made of, or a StackedRunner where `rules` have
    ranks. On CPU the rest compiles on in the background.

    Args:
        params: by WeightSpec.path, placed as the specs say.
        progress: called in this thread with (programs compiled, in all).
        compilation_cache_dir: of JAX's cache and of whole programs, or None.
        facts: what the model's code depends on beside its parameters; told by their repr.
        host_bytes: of RAM, parameters included, for all of the mesh where it is a CPU's.
    """
    if compilation_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", compilation_cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    sizing, on_each_rank = Sizing(model, rules, settings, host_bytes), for_ranks(rules)
    memory = sizing.memory(local_bytes(params.values()))
    num_pages, folder = sizing.reached(sizing.pages(memory)), None
    devices = list(rules.mesh.devices.flat)
    # On a CPU programs compile while others serve, and depend on more than its kind.
    if compilation_cache_dir is not None and rules.platform != "cpu":
        folder = Path(compilation_cache_dir) / "programs"
    guard = CompileGuard(settings.recompile_guard)
    while True:
        programs = sizing.programs(num_pages)
        rest = list(others(programs))
        if rules.platform != "cpu":  # all are waited for: those that take longest come first
            rest.sort(key=lambda program: (program.key.name != "forward", not program.key.variant))
        manifest = Manifest(
            [on_each_rank(program) for program in required(programs)],
            [on_each_rank(program) for program in rest],
            guard,
            functools.partial(compiler_options, rules),
            ProgramStore(folder, (*facts, settings, num_pages), devices),
        )
        # Autotuning needs memory, so a device's pool is allocated after the last compilation.
        manifest.compile(progress, everything=rules.platform != "cpu")
        compiled = (manifest.ready[p.key] for p in largest(programs))
        memory = measured(memory, compiled, rules.platform)
        fitting = sizing.reached(sizing.pages(memory))
        if fitting >= num_pages:
            break
        num_pages = fitting  # temporaries are larger than what the fraction leaves: rare
    logger.info("memory of one device:\n%s", memory.table(num_pages, settings.page_size))
    return programs, params, manifest, guard, num_pages


def compiler_options(rules: Rules, key: Key) -> Options | None:
    if rules.platform != "gpu":
        return None
    split = _GPU_SPLIT if rules.mesh.size > 1 else {}
    return _GPU_OPTIONS | split | (_GPU_LARGE if key.size >= SEARCHED_BELOW else {})


def required(programs: Programs) -> Iterator[Program]:
    """What serves every step, if not cheaply."""
    yield from (init_program(programs.shapes), programs.edit(), recount_program(programs.shapes))
    yield programs.forward(Kind.DECODE, programs.buckets.rows[-1])
    yield from largest(programs)


def largest(programs: Programs) -> tuple[Program, Program, Program]:
    """The programs that need the most memory."""
    rows, tokens = programs.buckets.rows[-1], programs.buckets.tokens[-1]
    head = programs.head(rows, *HEADS[-1])
    return programs.forward(Kind.MIXED, tokens), head, score_program(programs, tokens)


def others(programs: Programs) -> Iterator[Program]:
    """What plain traffic needs first comes first, small sizes before large ones."""
    rows, tokens = programs.buckets.rows, programs.buckets.tokens
    yield from (programs.head(n, *variant) for variant in HEADS[:-1] for n in rows)
    yield from (programs.forward(Kind.DECODE, n) for n in rows[:-1])
    yield from (programs.forward(Kind.MIXED, n) for n in tokens[:-1])
    yield from (programs.head(n, *HEADS[-1]) for n in rows[:-1])
    yield from (score_program(programs, n) for n in tokens[:-1])


def init_program(shapes: Shapes) -> Program:
    """init() → kv, state: all zeros."""
    spec = (shapes.kv, shapes.state)

    def init() -> tuple[KVPool, SlotState]:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec)

    return Program(Key("init"), init, (), (), shardings(spec))


@dataclasses.dataclass(frozen=True, slots=True)
class Sizing:
    """How large a pool a model on a mesh gets."""

    model: Model
    rules: Rules
    settings: RunnerSettings
    host_bytes: int | None = None

    def programs(self, num_pages: int) -> Programs:
        settings = self.settings
        shapes = Shapes(
            self.model,
            self.rules,
            num_slots=settings.num_slots,
            num_pages=num_pages,
            page_size=settings.page_size,
            context_length=settings.context_length,
            kv_dtype=settings.kv_dtype,
            group_pages=tuple(share.pages(num_pages) for share in self.shares()),
        )
        chunk = settings.chunked_prefill_size
        if self.rules.ranks is not None:  # one rank's chunk takes every rank's decode rows along
            chunk = max(chunk, settings.num_slots)
        least = 2 if self.rules.platform == "gpu" else 1  # XLA's products of one row are no faster
        return Programs(shapes, Buckets.of(settings.num_slots, chunk, least))

    def shares(self) -> tuple[WindowShare, ...]:
        """Of the model's cache groups."""
        settings, cache = self.settings, self.model.cache
        return tuple(
            WindowShare.of(
                cache,
                group,
                self._page_bytes(group),
                page_size=settings.page_size,
                num_slots=settings.num_slots,
                chunk=settings.chunked_prefill_size,
                context_length=settings.context_length,
                ratio=settings.swa_full_tokens_ratio,
            )
            for group in cache.groups
        )

    def _page_bytes(self, shape: KVShape) -> int:
        """Of one page on each device."""
        alone = dataclasses.replace(shape, groups=())
        spec = pool_spec(alone, 1, self.settings.page_size, self.settings.kv_dtype, self.rules)
        return local_bytes(jax.tree.leaves(spec))

    def memory(self, weights: int) -> DeviceMemory:
        """Of one device; what the steps' temporaries take is not known yet."""
        return DeviceMemory(
            limit=self.limit(),
            weights=weights,
            state=local_bytes(jax.tree.leaves(self.programs(2).shapes.state)),
            page=self._page_bytes(self.model.cache),
            shares=self.shares(),
        )

    def limit(self) -> int | None:
        """Bytes of one device, if they are known; those of a CPU share its RAM."""
        devices = self.rules.mesh.devices
        if self.rules.platform != "cpu":
            return device_limit(devices.flat[0])
        return self.host_bytes and self.host_bytes // devices.size

    def pages(self, memory: DeviceMemory) -> int:
        """By --max-total-tokens, else what weights and temporaries leave free."""
        settings = self.settings
        if memory.limit is not None and memory.most_pages() < 2:  # one is for padding
            raise ConfigError(self._too_full(memory, memory.limit))
        if settings.max_total_tokens is not None:
            return self._asked_pages(memory, settings.max_total_tokens)
        if memory.limit is None:
            raise ConfigError("this device does not tell its memory; give --max-total-tokens")
        fraction = settings.mem_fraction_static
        pages = memory.num_pages(fraction)
        if (pages - 1) * settings.page_size < settings.context_length:
            raise ConfigError(
                f"--mem-fraction-static {fraction} leaves a KV pool of {pages} pages of "
                f"{settings.page_size} tokens, too few for --context-length "
                f"{settings.context_length}; raise the first or lower the second"
            )
        return pages

    def _too_full(self, memory: DeviceMemory, limit: int) -> str:
        """What to say where no pool has room."""
        settings = self.settings
        slots = f"--max-running-requests {settings.num_slots}"
        takers = {
            "weights": memory.weights,
            f"{slots} of --context-length {settings.context_length}": memory.state,
            f"a step of --chunked-prefill-size {settings.chunked_prefill_size}": memory.temporaries,
        }
        sizes = ", ".join(f"{what} ({size / 2**30:.1f} GiB)" for what, size in takers.items())
        return f"{limit / 2**30:.1f} GiB of each device have no room for a KV pool beside {sizes}"

    def reached(self, num_pages: int) -> int:
        """Of a pool of so many pages, those that this platform's kernels reach. Raises ConfigError
        when fewer were asked for by --max-total-tokens.
        """
        if self.rules.platform != "gpu":
            return num_pages
        pages = reached_pages(num_pages, lambda n: jax.tree.leaves(self.programs(n).shapes.kv))
        asked, page_size = self.settings.max_total_tokens, self.settings.page_size
        if pages < num_pages and asked is not None:
            raise ConfigError(
                f"--max-total-tokens {asked} makes a float8 pool of which GPU kernels reach "
                f"{(pages - 1) * page_size} tokens: ask for those at most, or for more than twice "
                "as many"
            )
        if pages < num_pages:
            logger.info(
                "the float8 pool ends at %d of %d pages: kernels reach no more", pages, num_pages
            )
        return pages

    def _asked_pages(self, memory: DeviceMemory, tokens: int) -> int:
        page_size = self.settings.page_size
        pages = math.ceil(tokens / page_size) + 1
        if memory.limit is not None and pages > (most := memory.most_pages()):
            raise ConfigError(
                f"--max-total-tokens {tokens} needs a KV pool of {memory.pool(pages) / 2**30:.1f} "
                f"GiB on each device; beside weights and a step, {memory.limit / 2**30:.1f} GiB "
                f"have room for {max(0, most - 1) * page_size} tokens at most"
            )
        return pages


def measured(
    memory: DeviceMemory, programs: Iterable[jax.stages.Compiled], platform: str
) -> DeviceMemory:
    """With the temporaries of the greediest program."""
    temporaries = max(temporary_bytes(program, platform) for program in programs)
    return dataclasses.replace(memory, temporaries=temporaries)
