"""JSON bodies as records.

Every field of the API is in one of three places: an attribute of a record (applied, or under
"accepted" because nothing depends on it), `unsupported` (refused unless its value asks for
nothing), or nowhere (refused by name). A null means that the field is absent. Types are strict: a
bool is no int, a string is no number. Ranges, and `sampling_params`, are the engine's to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from jserve.errors import RequestError
from jserve.server import malformed, unsupported

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_BodyT = TypeVar("_BodyT", bound="Body")


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object; `unsupported` maps fields of missing features to their idle value."""

    unsupported: ClassVar[Mapping[str, Any]] = {}


def decode(raw: bytes, body: type[_BodyT]) -> _BodyT:
    """Parse and check a request body. Raises RequestError naming the field."""
    try:
        fields = msgspec.json.decode(raw)
    except (RecursionError, ValueError) as error:
        raise malformed.json_error(raw, error) from None
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.")
    return convert(fields, body)


def convert(fields: Mapping[str, Any], body: type[_BodyT], at: str = "") -> _BodyT:
    """One JSON object as a record. `at` is its path. Raises RequestError naming the field."""
    known = {}
    for name, value in fields.items():
        if name in body.unsupported:
            unsupported.check_idle(name, value, body.unsupported[name], at)
        elif value is not None:
            known[name] = value
    try:
        return msgspec.convert(known, body, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise malformed.field_error(error, at, body) from None
