"""The grammars of requests on the API process's side: compiled before the requests are sent.

Only the request that needs one waits for it. How they are compiled is jserve/grammar's business.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable

import msgspec

from jserve.config import GrammarOptions
from jserve.engine.client import EngineClient
from jserve.engine.fanout import part_ids
from jserve.engine.reasoner import Reasoner
from jserve.engine.warm_up import forget
from jserve.errors import RequestError
from jserve.grammar.backend import GrammarError, Vocabulary
from jserve.grammar.choice import choose_backend
from jserve.grammar.compiler import CompilerLimits, GrammarCompiler
from jserve.grammar.spec import spec_of
from jserve.metrics.meter import Meter
from jserve.types import CompiledSpec, GrammarSpec, SamplingParams, Submit, Thinking

FIELDS = {
    "json": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
}
_NONE = dict.fromkeys(FIELDS.values())


class Grammars:
    """Args:
    vocabulary: called when the first grammar comes; so are the worker processes started then.

    Raises ConfigError for a backend that is not there.
    """

    def __init__(
        self,
        options: GrammarOptions,
        vocabulary: Callable[[], Vocabulary],
        client: EngineClient,
        meter: Meter,
    ) -> None:
        self._backend = choose_backend(options.grammar_backend)
        self._options, self._vocabulary = options, vocabulary
        self._client, self._meter = client, meter
        self.reasoner: Reasoner | None = None  # the Engine's to set, once it has a tokenizer
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._closed = False

    async def compiled(self, submit: Submit, require_reasoning: bool = False) -> Submit:
        """The request with its grammar in compiled form only; with `require_reasoning` that of
        what follows the thinking.

        Raises RequestError for one that cannot be compiled, or not within the limits. What aborts
        the request meanwhile ends it when it starts.
        """
        thinking = self._thinking(submit.prompt_ids) if require_reasoning else None
        spec = _spec(submit.sampling)
        if spec is None:
            return submit
        rids = part_ids(submit)
        for rid in rids:
            self._client.aborted_early.setdefault(rid, False)
        self._meter.count("num_grammar_total", 1)
        self._meter.count("num_grammar_queue_reqs", 1)
        try:
            compiled = await _outcome(self._compile(spec))
        except BaseException as error:  # cancelled, too
            forget(self._client, rids)
            self._meter.count("num_grammar_aborted_total", 1)
            if isinstance(error, GrammarError):
                raise _refusal(spec, str(error)) from None
            raise
        finally:
            self._meter.count("num_grammar_queue_reqs", -1)
        sampling = msgspec.structs.replace(submit.sampling, **_NONE)
        return msgspec.structs.replace(
            submit, sampling=sampling, grammar=compiled, thinking=thinking
        )

    def begin(self, samplings: list[SamplingParams]) -> None:
        """Compile what several requests are about to ask for, beside each other."""
        for sampling in samplings:
            spec = _spec(sampling)
            if spec is not None:
                self._compile(spec)

    def flush(self) -> None:
        """Forget what was compiled."""
        if self._compiler is not None:
            self._compiler.flush()

    def close(self) -> None:
        with self._lock:
            self._closed, compiler = True, self._compiler
        if compiler is not None:
            compiler.close()

    def _thinking(self, prompt_ids: list[int]) -> Thinking | None:
        if self.reasoner is None:
            message = "require_reasoning needs a server that was started with --reasoning-parser."
            raise RequestError(message, "require_reasoning")
        return self.reasoner.thinking(prompt_ids)

    def _compile(self, spec: GrammarSpec) -> concurrent.futures.Future[CompiledSpec]:
        """Raises RequestError when there is nothing to compile with."""
        if self._backend == "none":
            raise _refusal(spec, "the server's --grammar-backend is none")
        with self._lock:
            if self._closed:
                raise _refusal(spec, "the engine is shutting down")
            if self._compiler is None:
                vocabulary = self._vocabulary()
                if not vocabulary.eos_ids:
                    raise _refusal(spec, "the model has no end token, which has to follow it")
                options = self._options
                limits = CompilerLimits(
                    seconds=options.grammar_compile_timeout,
                    crowded_seconds=min(5.0, options.grammar_compile_timeout),
                    memory_mb=options.grammar_compile_memory_mb,
                    max_workers=options.grammar_workers,
                )
                self._compiler = GrammarCompiler(
                    self._backend, vocabulary, limits, meter=self._meter
                )
        return self._compiler.compile(spec)


def _spec(sampling: SamplingParams) -> GrammarSpec | None:
    given = {field: getattr(sampling, field) for field in FIELDS.values()}
    try:
        return spec_of(**given)
    except GrammarError as error:
        raise RequestError(f"{error}.", next(name for name in given if given[name])) from None


async def _outcome(future: concurrent.futures.Future[CompiledSpec]) -> CompiledSpec:
    """Others may wait for it too: it goes on when the one who asks here is cancelled."""
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(waiting)


def _refusal(spec: GrammarSpec, why: str) -> RequestError:
    field = FIELDS[spec.kind]
    return RequestError(f"Failed to compile {field} grammar: {why}.", field)
