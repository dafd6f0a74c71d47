"""The Python API, SGLang-shaped: an engine's start and end, and what core.py does, with flags,
dicts and blocking calls.

Synchronous methods are for threads that run no event loop.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Mapping
from typing import Any

import msgspec

from jserve.config import Config
from jserve.engine.aborts import abort, check_abort, mark
from jserve.engine.background import BackgroundLoop
from jserve.engine.batch_stream import generate_batch
from jserve.engine.batches import answer
from jserve.engine.client import EngineClient
from jserve.engine.core import EngineCore
from jserve.engine.early import check_model, check_options
from jserve.engine.flush import flush_when_idle
from jserve.engine.grammars import Grammars
from jserve.engine.life import EngineLife
from jserve.engine.questions import check_question
from jserve.engine.reasoner import Reasoner
from jserve.engine.render import render_output
from jserve.engine.reporter import Reporter
from jserve.engine.request_log import RequestLog
from jserve.engine.sampling_defaults import sampling_defaults
from jserve.engine.sampling_params import sampling_from_dict
from jserve.engine.thoughts import Thoughts
from jserve.engine.tracing import Tracer
from jserve.errors import ConfigError, RequestError, TimedOutError
from jserve.grammar.backend import Vocabulary
from jserve.metrics import Metrics
from jserve.metrics.meter import NO_METER
from jserve.metrics.priority import make_mark, no_mark
from jserve.models.architectures import find_architecture
from jserve.tokenizer.loader import load_tokenizer
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.tokenizer.vocabulary import vocabulary_of
from jserve.types import ControlReply, ModelConfig
from jserve.weights.checkpoint import open_checkpoint

__all__ = ["Engine", "render_output", "sampling_from_dict"]


class Engine:
    """A running engine; ready when the constructor returns, usable from any event loop and thread.

    Args:
        model_path: what --model-path takes.
        config: a whole Config, in place of model_path and flags.
        inline: run the engine in a thread of this process.
        builder: "module:function" that makes the Loop, and
        tokenizer: in place of the model's; both for tests.
        flags: any flag, with underscores, also the short ones; log_level defaults to "error".

    Raises ConfigError or WeightError when it cannot start, EngineDeadError when it died meanwhile.
    `generate_stream` is EngineCore's, `generate_batch` batch_stream.py's.
    """

    def __init__(
        self,
        model_path: str = "",
        *,
        config: Config | None = None,
        inline: bool = False,
        builder: str = "jserve.engine.startup:build",
        tokenizer: Tokenizer | None = None,
        **flags: Any,
    ) -> None:
        config = _config_of(config, flags | ({"model_path": model_path} if model_path else {}))
        check_options(config)
        if inline and tokenizer is None:  # a thread that loads cannot be stopped
            check_model(config)
        self._background = BackgroundLoop()
        self.config = config
        model, server = config.model, config.server
        name = model.served_model_name or model.model_path
        queue = config.scheduler
        ranked = queue.enable_priority_scheduling
        mark = make_mark(queue.default_priority_value) if ranked else no_mark
        self.metrics = Metrics(server.metrics_prefix, name, lambda: self._client.gauges, mark)
        self.meter = self.metrics.meter if server.enable_metrics else NO_METER
        self._tracer = Tracer(server.otlp_traces_endpoint, name) if server.enable_trace else None
        self.sampling_defaults: Mapping[str, float] = {}
        self._life = EngineLife(config, builder, inline)
        self._client = EngineClient(self._life)
        self.grammars = Grammars(config, self._vocabulary, self._client, self.meter)
        atexit.register(self.shutdown)
        try:
            if tokenizer is None:
                checkpoint = open_checkpoint(model, find_architecture)
                self.sampling_defaults = sampling_defaults(checkpoint)
                paths = (model.tokenizer_path, model.chat_template)
                tokenizer = load_tokenizer(checkpoint, *paths, self.meter.timing)
            self.tokenizer = tokenizer
            if server.reasoning_parser is not None:
                parser = server.reasoning_parser
                self.grammars.reasoner = Reasoner(parser, tokenizer, model.model_path)
            self.server_info = self._life.await_ready(server.log_level in ("debug", "info"))
            self.model_config = msgspec.convert(self.server_info.pop("model_config"), ModelConfig)
            self.rank_facts = self.server_info.pop("ranks", [self.server_info])
        except BaseException:
            self.shutdown()
            raise
        limits = (self.model_config.vocab_size, int(self.server_info["context_length"]))
        reporters: list[Reporter] = [] if self._tracer is None else [self._tracer]
        core = EngineCore(
            config, self._client, tokenizer, self.meter, self.grammars, limits, reporters
        )
        stream = core.generate_stream
        batch = functools.partial(generate_batch, core, int(self.server_info["page_size"]))
        self.generate_stream, self.generate_batch = stream, batch
        if server.reasoning_parser is not None:
            counted = Thoughts(server.reasoning_parser, tokenizer).counted
            self.generate_stream = lambda request: counted(stream(request), [request])
            self.generate_batch = lambda requests: counted(batch(requests), requests)
        self.request_log = RequestLog(tokenizer, reporters)
        self.request_log.configure(server.log_requests, server.log_requests_level)

    @classmethod
    def from_config(cls, config: Config, *, inline: bool = False) -> Engine:
        return cls(config=config, inline=inline)

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """A dict {"text", "output_ids", "meta_info"}; a list of them for a batch or n > 1, prompts
        outermost. With `stream` an iterator of them, cumulative, each with its place in that list
        as "index" where there is more than one.

        Arguments are prompt, sampling_params, input_ids, and by name return_logprob, stream, rid…:
        docs/python.md has a table of them all. Raises RequestError naming the argument.
        """
        result = self._background.call(self.async_generate(*arguments, **options))
        return self._background.iterate(result) if options.get("stream") else result

    async def async_generate(self, *arguments: Any, **options: Any) -> Any:
        """As `generate`; with `stream` the result is an async iterator."""
        generate, text = self.generate_batch, self.tokenizer.id_to_text
        return await answer(generate, text, self.config.execution.dp_size, *arguments, **options)

    async def control(self, op: str, **args: str | int | float | bool) -> ControlReply:
        """Ask the engine: an `op` of types.Control with its arguments. Raises EngineDeadError,
        TimedOutError where it, or a rank that must, does not answer for a while, and RequestError
        for what cannot be asked."""
        check_question(op, args)
        if op == "flush_cache" and await self.grammars.waits.hold_up_flush():
            return ControlReply(id="", ok=False)
        if op == "pause_generation" and args.get("mode", "abort") == "abort":
            mark(self._client)  # the engine aborts what was sent; what comes later waits
            self.grammars.waits.wake()
        reply = await self._client.control(op, **args)
        if reply.deaf and not reply.ok:
            raise TimedOutError(f"{op}: {reply.message}.")
        if op == "flush_cache" and reply.ok:
            self.grammars.flush()
        return reply

    def abort(self, rid: str = "", abort_all: bool = False) -> None:
        """End every request whose id starts with `rid`; they finish with reason abort. Raises
        RequestError for an id that is no string, and for `abort_all` that is no bool."""
        check_abort(rid, abort_all)
        if self._life.forked:
            self._client.require_alive()
        elif rid or abort_all:
            abort(self._client, rid, abort_all)
            self.grammars.waits.wake()

    def _vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.tokenizer, self.model_config)

    @property
    def gauges(self) -> dict[str, float]:
        """The engine's numbers of a moment ago."""
        return self._client.gauges.values

    @property
    def ranks(self) -> list[tuple[int, dict[str, float], dict[str, Any]]]:
        """The number of each data-parallel rank that lives, its `gauges` and its facts."""
        gauges = self._client.gauges
        ranks = gauges.ranks or {0: gauges}
        return [(rank, one.values, self.rank_facts[rank]) for rank, one in ranks.items()]

    @property
    def healthy(self) -> bool:
        return not self._life.ended

    def flush_cache(self, timeout: float = 0.0) -> bool:
        """Drop every cached prefix; False when the engine is busy for `timeout` seconds."""
        return self._background.call(flush_when_idle(self.control, timeout)).ok

    def pause_generation(self, mode: str = "abort") -> None:
        """Run nothing until `continue_generation`; requests that come meanwhile wait.

        Args:
            mode: of what runs or waits: "abort" ends it; "retract" takes it off the device, so that
                the cache can be flushed, and later it goes on where it was; "in_place" keeps it and
                its KV. Raises RequestError for another one.
        """
        reply = self._background.call(self.control("pause_generation", mode=mode))
        if not reply.ok:
            raise RequestError(reply.message, "mode")

    def continue_generation(self) -> None:
        """End a pause; without one, nothing happens."""
        self._background.call(self.control("continue_generation"))

    def get_server_info(self) -> dict[str, Any]:
        """Options, facts of the running engine, and its counters of this moment."""
        reply = self._background.call(self.control("server_info"))
        return {**self.config.flat(), **self.server_info, **reply.payload}

    def shutdown(self) -> None:
        """End the engine; open requests fail with EngineDeadError. Later calls do nothing, and
        neither do those of a forked process."""
        atexit.unregister(self.shutdown)
        if self._life.forked:
            return
        self.grammars.close()
        self._life.shutdown(self._client.reader)
        if self._tracer is not None:
            self._tracer.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _config_of(config: Config | None, flags: Mapping[str, Any]) -> Config:
    """Raises ConfigError where both are given."""
    if config is None:
        return Config.from_flags(**{"log_level": "error", **flags})
    if flags:
        raise ConfigError(f"config holds every option; without it: {', '.join(sorted(flags))}")
    return config
