"""Whether what a Python program passes can be sent and shown: texts that UTF-8 has, and integers
that messages have, or at least words. JSON's texts and numbers are checked where they are read.

Knows names of arguments, nothing of their types and ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.errors import RequestError
from jserve.types.wording import lone_surrogate

#: Beside the sign. Of integers that are sent as they are; and of those that are looked at before:
#: Python writes no longer ones.
SENT, SHOWN = 63, 10_000


def check_sendable(name: str, value: Any, bits: int = SHOWN) -> None:
    """`value` is as JSON has it, of finite depth. Raises RequestError naming the argument, or the
    one of sampling_params."""
    left = [(name, value)]
    while left:
        name, value = left.pop()
        match value:
            case str():
                if lone_surrogate(value):
                    raise RequestError(f"{name} must not hold lone surrogates.", name)
            case int():
                if value.bit_length() > bits:
                    raise RequestError(f"{name} must have no more than {bits} bits.", name)
            case Mapping():
                for key, one in value.items():
                    inner = name == "sampling_params" and isinstance(key, str)
                    left += (name, key), (key if inner else name, one)
            case list() | tuple() if set(map(type, value)) == {int}:  # ids, of which many come
                left += (name, min(value)), (name, max(value))
            case list() | tuple():
                left += [(name, one) for one in value]
