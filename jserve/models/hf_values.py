"""Single values of a model's config, each checked as it is read.

A wrong one raises ConfigError that names its key and says what was expected. Null counts as absent.
Knows no family and no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jserve.errors import ConfigError

_INT32 = 2**31 - 1
#: Of things that are made one by one at start: layers, experts.
_MOST_PARTS = 100_000
_PARTS = ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts")
_LAYERS = ("full_attention", "sliding_attention")


def wrong(key: str, expected: str, value: Any) -> ConfigError:
    """The error to raise."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return ConfigError(f"the model's config: {key} must be {expected}, is {shown}")


def section(hf: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object of settings, {} where there is none."""
    value = hf.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(key, "an object", value)
    return value


def count(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; without a default it must be there, with one 0 is none too."""
    value = hf.get(key)
    if default is not None and (value is None or (type(value) is int and value == 0)):
        value = default
    if value is None:
        raise ConfigError(f"the model's config lacks {key!r}")
    if type(value) is not int or value < 1:
        raise wrong(key, "a positive integer", value)
    most = _MOST_PARTS if key in _PARTS else _INT32
    if value > most:
        raise wrong(key, f"at most {most}", value)
    return value


def count_or_none(hf: Mapping[str, Any], key: str) -> int | None:
    return None if hf.get(key) is None else count(hf, key)


def from_zero(hf: Mapping[str, Any], key: str, default: int = 0) -> int:
    """An integer that may be 0."""
    value = hf.get(key)
    if value is None:
        return default
    if type(value) is not int or not 0 <= value <= _INT32:
        raise wrong(key, f"an integer from 0 to {_INT32}", value)
    return value


def number(hf: Mapping[str, Any], key: str, default: float) -> float:
    """A finite number over 0; `default` also in place of 0."""
    value = number_or_none(hf, key)
    return default if value is None else value


def number_or_none(hf: Mapping[str, Any], key: str) -> float | None:
    """A finite number over 0; None also in place of 0."""
    value = hf.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not (math.isfinite(value) and 0 <= value < 1e30):
        raise wrong(key, "a number over 0", value)
    return value or None


def flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = hf.get(key)
    if value is None:
        return default
    if type(value) is not bool:
        raise wrong(key, "true or false", value)
    return value


def text(hf: Mapping[str, Any], key: str, default: str = "") -> str:
    value = hf.get(key)
    if value is None:
        return default
    if type(value) is not str:
        raise wrong(key, "a text", value)
    return value


def one_of(hf: Mapping[str, Any], key: str, served: Sequence[str]) -> str:
    value = text(hf, key)
    if value not in served:
        raise ConfigError(
            f"the model's config: {key} {value!r} is not supported here, "
            f"only {' and '.join(served)}"
        )
    return value


def numbers_from_zero(hf: Mapping[str, Any], key: str) -> Sequence[int]:
    """A list of integers, none of them negative."""
    values = hf.get(key)
    if values is None:
        return ()
    if not isinstance(values, list | tuple) or not all(_is_index(one) for one in values):
        raise wrong(key, "a list of integers from 0 on", values)
    return values


def layer_kinds(hf: Mapping[str, Any], usual: Sequence[str]) -> Sequence[str]:
    """`layer_types`, one a layer; `usual` where there are none."""
    kinds = hf.get("layer_types")
    if kinds is None:
        return usual
    if not isinstance(kinds, list | tuple):
        raise wrong("layer_types", f"a list of {' and '.join(_LAYERS)}", kinds)
    for layer, kind in enumerate(kinds):
        if kind not in _LAYERS:
            raise wrong(f"layer_types[{layer}]", " or ".join(_LAYERS), kind)
    if kinds and len(kinds) != len(usual):
        lengths = f"{len(kinds)} layers, num_hidden_layers is {len(usual)}"
        raise ConfigError(f"the model's config: layer_types is of {lengths}")
    return kinds or usual


def token_ids(hf: Mapping[str, Any], key: str) -> Sequence[int]:
    """One id or a list of them."""
    value = hf.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else (value,)
    if not all(_is_index(one) for one in ids):
        raise wrong(key, "token ids", value)
    return ids


def _is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _INT32
