"""What is known to be wrong before a model is loaded: it costs nobody a minute, and no device.

Owns the order in which options and the files that they name are looked at. Touches no device, asks
no hub, and reads no tensor: what it lets pass may still be refused by whoever uses it.
"""

from __future__ import annotations

from pathlib import Path

from jserve.config import Config, check_together
from jserve.config.cache_dir import compilation_cache
from jserve.engine.reasoner import Reasoner
from jserve.engine.sampling_defaults import sampling_defaults
from jserve.engine.tracing import require_telemetry
from jserve.grammar.choice import choose_backend
from jserve.models.architectures import find_architecture
from jserve.tokenizer.first_look import check_tokenizer
from jserve.tokenizer.loader import load_tokenizer
from jserve.tokenizer.template_dialect import compile_template, read_template
from jserve.weights.checkpoint import Checkpoint, is_here, open_checkpoint

_ELSEWHERE = Checkpoint("hub", Path(), {}, {})  # read once it is downloaded
_IN_FILES = ("safetensors", "gguf")


def check_early(config: Config) -> None:
    """All of it. Raises ConfigError, WeightError."""
    check_options(config)
    check_model(config)


def check_options(config: Config) -> None:
    """Options, but for the model and its tokenizer. Raises ConfigError."""
    check_together(config)
    compilation_cache(config.execution)
    choose_backend(config.grammar.grammar_backend)
    if config.server.enable_trace:
        require_telemetry()
    if config.model.chat_template is not None:
        compile_template(read_template(config.model.chat_template))


def check_model(config: Config) -> None:
    """The model and its tokenizer, unless they are to be downloaded. Raises ConfigError,
    WeightError."""
    model, checkpoint = config.model, _ELSEWHERE
    if is_here(model.model_path):
        checkpoint = open_checkpoint(model, find_architecture)
        sampling_defaults(checkpoint)
        if checkpoint.kind in _IN_FILES:
            checkpoint.tensors()
    if is_here(model.tokenizer_path or model.model_path):
        asked = (checkpoint, model.tokenizer_path, model.chat_template)
        check_tokenizer(*asked)
        if (parser := config.server.reasoning_parser) is not None:
            Reasoner(parser, load_tokenizer(*asked), model.model_path)
