"""The frontend language: Python programs that say what they generate.

    import jserve.lang as sgl

Names and meanings are SGLang's; docs/language.md is the guide. A program (program.py) adds
expressions (ir.py, made by api.py) to its state (state.py); an executor (executor.py) does them one
after the other on a backend (backends/).
"""

from __future__ import annotations

from typing import NoReturn

from jserve import __version__
from jserve.engine.engine import Engine
from jserve.lang.api import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from jserve.lang.backends.base import Usage
from jserve.lang.backends.endpoint import RuntimeEndpoint
from jserve.lang.backends.engine import EngineBackend
from jserve.lang.backends.openai import OpenAI
from jserve.lang.backends.scripted import TestBackend
from jserve.lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from jserve.lang.control import flush_cache, get_server_info, set_default_backend
from jserve.lang.errors import (
    BackendError,
    DtypeError,
    ExpressionError,
    ProgramCancelled,
    ProgramError,
    RefusedError,
)
from jserve.lang.executor import ProgramWarning
from jserve.lang.program import SglFunction, function
from jserve.lang.runtime import Runtime
from jserve.lang.settings import global_config
from jserve.lang.state import ProgramState

__all__ = [
    "BackendError",
    "DtypeError",
    "Engine",
    "EngineBackend",
    "ExpressionError",
    "OpenAI",
    "ProgramCancelled",
    "ProgramError",
    "ProgramState",
    "ProgramWarning",
    "RefusedError",
    "Runtime",
    "RuntimeEndpoint",
    "SglFunction",
    "TestBackend",
    "Usage",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]

_NOT_HERE = {
    **dict.fromkeys(("Anthropic", "LiteLLM", "VertexAI", "Crusoe"), "OpenAI(base_url=…)"),
    "ServerArgs": "the flags of Engine and Runtime",
}


def __getattr__(name: str) -> NoReturn:
    """SGLang's names that are not here."""
    hint = f"; use {_NOT_HERE[name]}" if name in _NOT_HERE else ""
    raise AttributeError(f"module 'jserve.lang' has no attribute {name!r}{hint}")
