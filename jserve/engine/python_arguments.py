"""What a Python program passes to Engine.generate → the arguments of requests.expand.

Here None is "not given", arrays and scalars of numpy, JAX and torch are lists and numbers, and
SGLang's arguments of features that are not there may be passed if they ask for nothing. What the
arguments mean, and their types, is expand's to check.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jserve.engine.requests import expand
from jserve.engine.sendable import check_sendable
from jserve.engine.unsupported import GENERATE, is_idle, refused
from jserve.errors import RequestError
from jserve.types.wording import nearest_name

_KNOWN = tuple(inspect.signature(expand).parameters)
_BY_POSITION = 3  # prompt, sampling_params, input_ids
#: Beside what a body may name: what a server takes from headers, or puts into bodies only.
_NOTHING = GENERATE | refused("external_trace_header return_prompt_token_ids background")
_PLAIN = {bool, int, float, str, bytes, type(None)}


@runtime_checkable
class _Array(Protocol):
    """An array or a scalar of numpy, JAX or torch."""

    def tolist(self) -> Any: ...


def python_arguments(given: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for expand. Raises RequestError naming one that cannot be."""
    if len(given) > _BY_POSITION:
        rule = "prompt, sampling_params and input_ids go by position, all others by name"
        raise RequestError(f"generate got {len(given)} arguments without a name: {rule}.")
    named = dict(zip(_KNOWN, given, strict=False))
    for name in options:
        if name in named:
            raise RequestError(f"{name} is given twice, by position and by name.", name)
    known: dict[str, Any] = {}
    for name, value in (named | dict(options)).items():
        if name not in _KNOWN and name not in _NOTHING:
            near = nearest_name(name, _KNOWN)
            hint = f"; did you mean {near}?" if near else "."
            raise RequestError(f"{name} is not an argument of generate{hint}", name)
        try:
            value = _plain(value)
        except RecursionError:
            raise RequestError(f"{name} is nested too deeply.", name) from None
        if name != "prompt":  # long; the tokenizer tells
            check_sendable(name, value)
        if name in _KNOWN:
            known |= {} if value is None else {name: value}
        elif not is_idle(value, _NOTHING[name]):
            raise RequestError(f"{name} is not supported yet.", name)
    return known


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, _Array):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple) and not set(map(type, value)) <= _PLAIN:
        return [_plain(one) for one in value]
    return value
