"""Whether an answer looks as its call asked, for servers that may not have heeded that.

Owns the check of what has come; who asks for it, and names the program's line, is the backend's
caller. A schema is judged by jsonschema, all else by the server's own grammars.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

import referencing
import regex
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import extend, validator_for
from referencing.exceptions import Unresolvable

from jserve.engine.sampling_params import sampling_from_dict
from jserve.errors import RequestError
from jserve.grammar.spec import JSON_OBJECT
from jserve.lang.backends.rules import Rules, syntax_rules
from jserve.lang.errors import BackendError
from jserve.lang.sampling import Sampling, schema_value
from jserve.types import SamplingParams

_SHOWN = 200  # characters of an answer, in an error
_SECONDS = 1.0  # for one pattern of a schema


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """Of one call. `asked` is what for, `wrong` says what of it a whole answer is not ("": it is),
    `begins` whether a whole one can begin so; `stops`: whether the call's own may end it before."""

    asked: str
    wrong: Callable[[str], str]
    begins: Callable[[str], bool]
    stops: bool

    def check(self, text: str, reason: str | None) -> None:
        """`reason`: the answer's finish_reason. Raises BackendError."""
        why = self.wrong(text)
        cut = reason == "length" or self.stops
        if why and not (cut and self.begins(text)):
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
            raise BackendError(
                f"the answer, {shown!r}, does not match its {self.asked}: {why}; "
                "the server has probably not heeded it"
            )


def fit_of(sampling: Sampling) -> Fit | None:
    """Of what `resolved` gave; None where any answer fits. Raises RequestError naming the field for
    what no answer can be held against."""
    if (asked := sampling.constraint) is None:
        return None
    stops = bool(sampling.stop or sampling.stop_regex or sampling.stop_token_ids)
    if sampling.json_schema is not None or sampling.json_object:
        any_json = syntax_rules(SamplingParams(json_schema="{}"))
        schema = sampling.json_schema
        wrong = _schema_check(JSON_OBJECT.text if schema is None else str(schema))
        return Fit(asked, wrong, lambda text: any_json.begins(_squeezed(text)), stops)
    rules = syntax_rules(sampling_from_dict(sampling.to_native()))
    return Fit(asked, _grammar_check(rules), rules.begins, stops)


def _grammar_check(rules: Rules) -> Callable[[str], str]:
    return lambda text: "" if rules.is_whole(text) else "it does not allow this text"


def _squeezed(text: str) -> str:
    """One blank for many: their number says nothing of whether JSON begins so."""
    return re.sub(r"\s+", " ", text.lstrip())


def _schema_check(text: str) -> Callable[[str], str]:
    try:
        schema = schema_value(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"json_schema is not JSON: {error}.", "json_schema") from None
    kind = validator_for(schema, Draft202012Validator)
    if error := best_match(kind(kind.META_SCHEMA).iter_errors(schema)):
        message = f"json_schema: at {error.json_path}: {error.message}."
        raise RequestError(message, "json_schema")
    validator = extend(kind, {"pattern": _pattern})(
        schema,
        registry=referencing.Registry(),  # nothing is fetched
    )

    def wrong(answer: str) -> str:
        try:
            value = json.loads(answer, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            return f"it is not JSON: {error}"
        try:
            error = best_match(validator.iter_errors(value))
        except (Unresolvable, RecursionError, TimeoutError, re.error, regex.error) as error:
            return f"the schema cannot be checked here: {type(error).__name__}: {error}"
        return "" if error is None else f"at {error.json_path}: {error.message}"

    return wrong


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Any:
    """With \\p{…}, which `re` does not know, and within a time."""
    if isinstance(value, str) and not regex.search(pattern, value, timeout=_SECONDS):
        yield ValidationError(f"{value!r} does not match {pattern!r}")
