"""Checkpoint → Tokenizer, once, at start."""

from __future__ import annotations

import threading

from jserve.metrics.timing import UNTIMED, Timing
from jserve.tokenizer.sources import find_source
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.weights.checkpoint import Checkpoint

_ONE_AT_A_TIME = threading.Lock()  # transformers imports its parts as they are named


def load_tokenizer(
    checkpoint: Checkpoint,
    tokenizer_path: str | None = None,
    chat_template: str | None = None,
    timing: Timing = UNTIMED,
) -> Tokenizer:
    """As sources.find_source finds it; ConfigError when there is none. From any thread."""
    with _ONE_AT_A_TIME:
        return Tokenizer(find_source(checkpoint, tokenizer_path, chat_template), timing)
