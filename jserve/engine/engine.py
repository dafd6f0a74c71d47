"""The Python API, SGLang-shaped: an engine's start and end, and what core.py does, with flags,
dicts and blocking calls.

Synchronous methods are for threads that run no event loop.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import Any

import msgspec

from jserve.config import Config
from jserve.engine.background import BackgroundLoop
from jserve.engine.batches import answer
from jserve.engine.client import EngineClient
from jserve.engine.core import EngineCore
from jserve.engine.life import EngineLife
from jserve.engine.render import render_output
from jserve.engine.requests import sampling_from_dict
from jserve.metrics import Metrics
from jserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from jserve.types import Abort, ControlReply, ModelConfig
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
        flags: any flag, with underscores; log_level defaults to "error".

    Raises ConfigError or WeightError when it cannot start, EngineDeadError when it died meanwhile.
    `generate_stream` is EngineCore's.
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
        if config is None:
            config = Config.from_flags(**{"log_level": "error", "model_path": model_path, **flags})
        self._background = BackgroundLoop()
        self.config = config
        model, server = config.model, config.server
        self.metrics = Metrics(server.metrics_prefix, model.served_model_name or model.model_path)
        self.generation_config: Mapping[str, Any] = {}
        self._life = EngineLife(config, builder, inline)
        self._client = EngineClient(self._life, self.metrics.engine)
        atexit.register(self.shutdown)
        try:
            if tokenizer is None:
                checkpoint = open_checkpoint(model)
                self.generation_config = checkpoint.generation_config
                tokenizer = load_tokenizer(checkpoint, model.tokenizer_path, model.chat_template)
            self.tokenizer = tokenizer
            self.server_info = self._life.await_ready(server.log_level in ("debug", "info"))
            self.model_config = msgspec.convert(self.server_info.pop("model_config"), ModelConfig)
        except BaseException:
            self.shutdown()
            raise
        limits = (self.model_config.vocab_size, int(self.server_info["context_length"]))
        core = EngineCore(config, self._client, tokenizer, self.metrics, *limits)
        self.generate_stream = core.generate_stream

    @classmethod
    def from_config(cls, config: Config, *, inline: bool = False) -> Engine:
        return cls(config=config, inline=inline)

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """A dict {"text", "output_ids", "meta_info"}; a list of them for a batch or n > 1, prompts
        outermost. With `stream` an iterator of them, cumulative, each with its place in that list
        as "index" where there is more than one.

        Arguments are those of requests.expand: prompt, sampling_params, input_ids, and by name
        return_logprob, stream, rid… Raises RequestError naming the argument.
        """
        result = self._background.call(self.async_generate(*arguments, **options))
        return self._background.iterate(result) if options.get("stream") else result

    async def async_generate(self, *arguments: Any, **options: Any) -> Any:
        """As `generate`; with `stream` the result is an async iterator."""
        return await answer(self.generate_stream, self.tokenizer.id_to_text, *arguments, **options)

    async def control(self, op: str) -> ControlReply:
        """Ask the engine: "flush_cache" or "server_info". Raises EngineDeadError."""
        return await self._client.control(op)

    def abort(self, rid: str = "", abort_all: bool = False) -> None:
        """End every request whose id starts with `rid`; they finish with reason abort."""
        if rid or abort_all:
            self._client.send(Abort(rid=rid, exact=False, abort_all=abort_all))

    @property
    def gauges(self) -> dict[str, float]:
        """The engine's numbers of a moment ago."""
        return self.metrics.gauges

    @property
    def healthy(self) -> bool:
        return not self._life.ended

    def flush_cache(self) -> bool:
        """Drop every cached prefix; False when the engine is busy."""
        return self._background.call(self.control("flush_cache")).ok

    def get_server_info(self) -> dict[str, Any]:
        """Options, facts of the running engine, and its counters of this moment."""
        reply = self._background.call(self.control("server_info"))
        return {**self.config.flat(), **self.server_info, **reply.payload}

    def shutdown(self) -> None:
        """End the engine; open requests fail with EngineDeadError. Later calls do nothing."""
        atexit.unregister(self.shutdown)
        self._life.shutdown(self._client.reader)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
