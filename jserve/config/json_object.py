"""Options whose value is a JSON object: read, and every key checked. Knows no option."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from jserve.errors import ConfigError


def read_object(flag: str, text: str | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`defaults` with what `text` sets; a value has its default's type, or is text for None.

    Raises ConfigError that names the flag and the key.
    """
    try:
        given = {} if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{flag} is not JSON: {error}; got {text!r}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {text!r}")
    for key, value in given.items():
        if key not in defaults:
            near = difflib.get_close_matches(key, defaults, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(defaults)}"
            raise ConfigError(f"{flag} has an unknown key {key!r}; {hint}")
        default = defaults[key]
        optional = default is None
        kind = str if optional else type(default)
        if type(value) is not kind and not (optional and value is None):
            raise ConfigError(f"{flag}: {key} must be {kind.__name__}, got {value!r}")
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{flag}: {key} must be >= 1, got {value}")
    return {**defaults, **given}
