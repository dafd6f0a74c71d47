"""Fields of features that are not there, by the body that names them.

A field leaves its table when its feature comes. Each maps to the value that asks for nothing.
"""

from __future__ import annotations

from typing import Any

from jserve.engine import unsupported as shared
from jserve.engine.unsupported import is_idle
from jserve.engine.unsupported import refused as _refused
from jserve.errors import RequestError

_RANKS = _refused("routed_dp_rank data_parallel_rank", 0)  # of several, ranked.py takes them
_ONE_RANK = "must be 0: this server has one data-parallel rank, which --dp-size is for"
_WHY = {"routed_dp_rank": _ONE_RANK, "data_parallel_rank": _ONE_RANK}
_OPENAI = (
    shared.EVERYWHERE
    | _RANKS
    | _refused("custom_params")
    | _refused("return_cached_tokens_details return_spec_tokens_details")
)
COMPLETION = _OPENAI | _refused("suffix")
CHAT = (
    _OPENAI
    | _refused("tools functions reasoning_effort max_thinking_tokens audio prediction verbosity")
    | _refused("web_search_options store return_meta_info")
    | _refused("return_input_ids_in_sglext return_output_ids_in_sglext")
    | _refused("tool_choice function_call", "none")
    | _refused("modalities", ["text"])
)
MESSAGE = _refused("tool_calls tool_call_id function_call annotations audio refusal")
GENERATE = shared.GENERATE | _RANKS

LOGGING = _refused("dump_requests_folder dump_requests_threshold crash_dump_folder")


def check_idle(name: str, value: Any, idle: Any, at: str) -> None:
    """Raise RequestError unless `value` asks for nothing; `at` is the path of the object."""
    if not is_idle(value, idle):
        path = f"{at}.{name}" if at else name
        raise RequestError(f"{path} {_WHY.get(name, 'is not supported yet')}.", path)
