"""Two log lines a request, under --log-requests: when it is accepted, and when a sequence ends.

    level 0   ids, lengths, template hash; at the end reason, counts and seconds
    level 1   and the sampling parameters that are not the default, stop strings among them
    level 2   and the first and last characters of prompt and output, 2,048 in all
    level 3   and all of them

Knows no files: lines go to the logger jserve.requests.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec

from jserve.engine.reporter import Reporter
from jserve.errors import RequestError
from jserve.metrics.boundary import boundaries
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import GenerateRequest, Output, SamplingParams, Submit

_logger = logging.getLogger("jserve.requests")

LEVELS = range(4)
_SHOWN = 2048  # characters of a text at level 2


class RequestLog:
    """A Reporter that adds itself to `reporters` while it is on."""

    def __init__(self, tokenizer: Tokenizer, reporters: list[Reporter]) -> None:
        self._tokenizer = tokenizer
        self._reporters = reporters
        self._level = 0

    def configure(self, on: bool | None = None, level: int | None = None) -> None:
        """None leaves things as they are. Raises RequestError for a level that does not exist."""
        if level is not None and level not in LEVELS:
            message = f"log_requests_level must be in [0, 3], got {level}."
            raise RequestError(message, "log_requests_level")
        self._level = self._level if level is None else level
        if on is not None and on != (self in self._reporters):
            (self._reporters.append if on else self._reporters.remove)(self)

    @property
    def configuration(self) -> dict[str, Any]:
        """Under the flags' names."""
        return {"log_requests": self in self._reporters, "log_requests_level": self._level}

    def received(self, request: GenerateRequest, submit: Submit) -> None:
        if request.no_logs:
            return
        fields: dict[str, Any] = {
            "rid": submit.rid,
            "prompt_tokens": len(submit.prompt_ids),
            "template_hash": self._tokenizer.template_hash,
            "n": request.sampling.n,
            "stream": request.stream,
        }
        if self._level >= 1:
            fields["sampling"] = _given(request.sampling)
        if self._level >= 2:
            fields["text"] = self._prompt(submit.prompt_ids, request.text)
        _logger.info("Receive: %s", _json(fields))

    def ended(self, request: GenerateRequest, rid: str, output: Output | None) -> None:
        if request.no_logs:
            return
        if output is None:
            # its client left, or a sibling of its batch was refused
            left = {"type": "abort", "message": "Closed before its end."}
            reason = left if self._level else left["type"]
            _logger.info("Finish: %s", _json({"rid": rid, "finish_reason": reason}))
            return
        times, finish = output.times, output.finish
        assert finish is not None, f"{rid=} goes on"
        fields: dict[str, Any] = {
            "rid": rid,
            "finish_reason": finish.type if not self._level else msgspec.to_builtins(finish),
            "prompt_tokens": output.prompt_tokens,
            "cached_tokens": output.cached_tokens,
            "completion_tokens": output.completion_tokens,
            "num_retractions": output.num_retractions,
            "num_steps": times.num_steps,
            "e2e_seconds": times.latest - times.created,
            "queue_seconds": times.queued,
            "first_token_seconds": max(times.first_token - times.created, 0.0),
        }
        seconds = {f"{name}_seconds": value for name, value in boundaries(times).items()}
        if self._level >= 2:
            fields["text"] = self._shown(output.text)
        _logger.info("Finish: %s", _json(fields | seconds))

    def _prompt(self, ids: list[int], text: str | None) -> str:
        if text is not None:
            return self._shown(text)
        if self._level > 2 or len(ids) <= 2 * _SHOWN:
            return self._shown(self._tokenizer.decode(ids, False))
        return self._shown(self._tokenizer.decode([*ids[:_SHOWN], *ids[-_SHOWN:]], False))

    def _shown(self, text: str) -> str:
        if self._level > 2 or len(text) <= _SHOWN:
            return text
        half = _SHOWN // 2
        return f"{text[:half]} … {text[-half:]}"


def _given(sampling: SamplingParams) -> dict[str, Any]:
    """What is not the default."""
    defaults, given = (
        msgspec.to_builtins(msgspec.structs.asdict(one), str_keys=True)
        for one in (SamplingParams(), sampling)
    )
    return {name: value for name, value in given.items() if value != defaults[name]}


def _json(fields: dict[str, Any]) -> str:
    rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in fields.items()}
    return json.dumps(rounded, ensure_ascii=False)
