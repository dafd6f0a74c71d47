"""SGLang's `sampling_params` dict → SamplingParams: names and types. Leaves ranges to
SamplingParams.verify; nothing is dropped silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from jserve.engine.syntax import NAMES, syntax_fields
from jserve.errors import RequestError
from jserve.types import SamplingParams
from jserve.types.wording import nearest_name

#: SGLang's names whose feature is not there; None (or an empty value) asks for nothing.
_UNSUPPORTED = ("beam_width", "custom_params", "watermark")
_OTHER_NAMES = {  # OpenAI's, and ours
    "seed": "sampling_seed",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
#: syntax_field is ours to set.
_NAMES = (*(name for name in SamplingParams.__struct_fields__ if name != "syntax_field"), *NAMES)
_WORDS = {  # an attribute's annotation in words
    "int": "an integer",
    "int | None": "an integer",
    "float": "a number",
    "bool": "true or false",
    "tuple[str, ...]": "a string or a list of strings",
    "tuple[int, ...]": "a list of token ids",
    "dict[int, float]": "a map from token ids to numbers",
}


def sampling_from_dict(params: Mapping[str, Any] | None) -> SamplingParams:
    """SamplingParams of SGLang's `sampling_params`. None means the default, but for max_new_tokens,
    where it is "up to the context length".

    Raises RequestError naming the field: unknown, of a feature that is not there, of a wrong type.
    """
    if not isinstance(params, Mapping | None):
        raise RequestError(f"sampling_params must be a mapping, got {params!r}.", "sampling_params")
    given: dict[str, Any] = dict(syntax_fields(params or {}))
    for name, value in (params or {}).items():
        if name in NAMES:
            continue
        if name in _UNSUPPORTED:
            if value:
                raise RequestError(f"{name} is not supported yet.", name)
        elif name not in _NAMES:
            raise _unknown(name)
        elif value is not None or name == "max_new_tokens":
            given[name] = value
    for name in ("stop", "stop_regex"):
        if type(given.get(name)) is str:
            given[name] = [given[name]]
    try:
        return msgspec.convert(given, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        field = re.search(r"\$\.(\w+)", str(error))
        assert field is not None, f"{error=}"
        name = field[1]
        words = _WORDS[SamplingParams.__annotations__[name]]
        raise RequestError(f"{name} must be {words}, got {given[name]!r}.", name) from None


def _unknown(name: Any) -> RequestError:
    near = _OTHER_NAMES.get(name) or nearest_name(str(name), _NAMES)
    hint = f"; did you mean {near}?" if near else "."
    return RequestError(f"{name} is not a sampling parameter{hint}", str(name))
