"""The grammars of requests on the API process's side: compiled before the requests are sent.

Only the request that needs one waits for it (grammar_waits.py). How they are compiled is
jserve/grammar's business.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from jserve.config import Config
from jserve.engine.client import EngineClient
from jserve.engine.grammar_waits import GrammarWaits
from jserve.engine.reasoner import Reasoner
from jserve.engine.route import Route
from jserve.errors import RequestError, TimedOutError
from jserve.grammar.backend import GrammarError, GrammarUnavailable, Vocabulary
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
        config: Config,
        vocabulary: Callable[[], Vocabulary],
        client: EngineClient,
        meter: Meter,
    ) -> None:
        self._options = config.grammar
        self._backend = choose_backend(self._options.grammar_backend)
        self._vocabulary, self._meter = vocabulary, meter
        self.waits = GrammarWaits(client, config.scheduler)
        self.reasoner: Reasoner | None = None  # the Engine's to set, once it has a tokenizer
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._closed = False

    async def compiled(
        self, submit: Submit, claims: Sequence[Route], require_reasoning: bool
    ) -> Submit:
        """The request with its grammar in compiled form only; with `require_reasoning` that of
        what follows the thinking. `claims` are its own.

        One that was aborted meanwhile comes back without; EngineClient.submit knows of that. Raises
        RequestError for one that cannot be compiled, or not within the limits, TimedOutError where
        it may be tried again, and what GrammarWaits.compiled does.
        """
        thinking = self._thinking(submit.prompt_ids) if require_reasoning else None
        spec = _spec(submit.sampling)
        if spec is None:
            return submit
        compiled, since = None, time.monotonic()
        self._meter.count("num_grammar_total", 1)
        self._meter.count("num_grammar_queue_reqs", 1)
        try:
            compiled = self._known(spec)
            if compiled is None:
                ends = (lambda: self._compile(spec), lambda future: self._leave(spec, future))
                compiled = await self.waits.compiled(claims, *ends)
        except GrammarUnavailable as error:
            message, _ = _refusal(submit.sampling, spec, str(error))
            raise TimedOutError(message) from None
        except GrammarError as error:
            raise RequestError(*_refusal(submit.sampling, spec, str(error))) from None
        finally:
            self._meter.count("num_grammar_queue_reqs", -1)
            self._meter.count("num_grammar_aborted_total", int(compiled is None))
        sampling = msgspec.structs.replace(submit.sampling, **_NONE)
        if compiled is None:
            nothing = msgspec.structs.replace(sampling, max_new_tokens=0, min_new_tokens=0)
            return msgspec.structs.replace(submit, sampling=nothing)
        waited = time.monotonic() - since
        found = {"sampling": sampling, "grammar": compiled, "thinking": thinking}
        return msgspec.structs.replace(submit, **found, waited=waited)

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

    def _known(self, spec: GrammarSpec) -> CompiledSpec | None:
        """What needs no waiting for. Raises GrammarError."""
        known = self._ready().known(spec)
        return None if known is None else known.result()

    def _compile(self, spec: GrammarSpec) -> concurrent.futures.Future[CompiledSpec]:
        return self._ready().compile(spec)

    def _leave(self, spec: GrammarSpec, future: concurrent.futures.Future[CompiledSpec]) -> None:
        """Whoever began it does not wait for it any more."""
        if self._compiler is not None:
            self._compiler.leave(spec, future)

    def _ready(self) -> GrammarCompiler:
        """Raises GrammarError when there is nothing to compile with."""
        if self._backend == "none":
            raise GrammarError("the server's --grammar-backend is none")
        with self._lock:
            if self._closed:
                raise GrammarUnavailable("the engine is shutting down")
            if self._compiler is None:
                vocabulary = self._vocabulary()
                if not vocabulary.eos_ids:
                    raise GrammarError("the model has no end token, which has to follow it")
                options = self._options
                limits = CompilerLimits(
                    seconds=options.grammar_compile_timeout,
                    crowded_seconds=min(5.0, options.grammar_compile_timeout),
                    memory_mb=options.grammar_compile_memory_mb,
                    max_workers=options.grammar_workers or _usual_workers(),
                )
                self._compiler = GrammarCompiler(
                    self._backend, vocabulary, limits, meter=self._meter
                )
            return self._compiler


def _usual_workers() -> int:
    """They share the processors; some may hang, and do not compute then."""
    return min(max(2 * (os.cpu_count() or 1), 4), 16)


def _spec(sampling: SamplingParams) -> GrammarSpec | None:
    given = {field: getattr(sampling, field) for field in FIELDS.values()}
    try:
        return spec_of(**given)
    except GrammarError as error:
        raise RequestError(f"{error}.", next(name for name in given if given[name])) from None


def _refusal(sampling: SamplingParams, spec: GrammarSpec, why: str) -> tuple[str, str]:
    """The message and the field, both in its caller's words."""
    field = sampling.syntax_field or FIELDS[spec.kind]
    return f"Failed to compile {field} grammar: {why}.", field
