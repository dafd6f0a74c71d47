"""Sampling parameters of a program: values of run() are the base, those of gen() override them.

Owns names, defaults and the translation into SGLang's native names and OpenAI's; ranges are the
server's to check.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

from jserve.lang.errors import DtypeError, ExpressionError
from jserve.lang.shown import check_text
from jserve.types.wording import written

#: Regex of each dtype, by the names that gen takes.
_REGEX = {
    "int": r"[-+]?[0-9]+[ \n]*",
    "float": r"[-+]?[0-9]*\.?[0-9]+[ \n]*",
    "bool": r"(True|False)",
    "str": r"\"[\w\d\s]*\"",
}
_DTYPES = {int: "int", float: "float", bool: "bool", str: "str"} | {name: name for name in _REGEX}
_NUMBER_STOPS = (" ", "\n")  # a number is over there


#: What else than a regex or a dtype says what the text must look like; one of all at most.
SYNTAXES = ("json_schema", "ebnf", "structural_tag", "json_object")
_FORMS: tuple[tuple[str, Any, str], ...] = (
    ("regex", str, "a text"),
    ("json_schema", str | Mapping, "a dict or text"),
    ("ebnf", str, "a text"),
    ("structural_tag", str | Mapping, "a dict or text"),
    ("json_object", bool, "true or false"),
    ("logit_bias", Mapping, "a dict from token ids to numbers"),
)
#: Sent by their names where they are said.
_AS_SAID = (
    *("repetition_penalty", "sampling_seed", "no_stop_trim", "skip_special_tokens"),
    *("spaces_between_special_tokens", "stream_interval"),
)


class MoreArguments(TypedDict, total=False):
    """Of Sampling's fields, those that SGLang's gen has not, for type checkers."""

    ebnf: str | None
    structural_tag: str | Mapping[str, Any] | None
    json_object: bool | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    sampling_seed: int | None
    no_stop_trim: bool | None
    skip_special_tokens: bool | None
    spaces_between_special_tokens: bool | None
    stream_interval: int | None


class SamplingArguments(MoreArguments, total=False):
    """Sampling's fields, for type checkers."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    n: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    stop_regex: str | Sequence[str] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    ignore_eos: bool | None
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None
    dtype: str | type | None
    regex: str | None
    json_schema: str | Mapping[str, Any] | None


def as_tuple(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _check_list(name: str, value: Any, kind: type, words: str) -> None:
    """Raises ExpressionError for neither None nor a list of that kind (for texts: or one alone)."""
    if value is None or (kind is str and isinstance(value, str)):
        return
    if not isinstance(value, Collection) or not all(isinstance(one, kind) for one in value):
        raise ExpressionError(f"{name} must be {words}, got {written(value)}.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """None: not said here. `DEFAULTS` says the rest. Raises ExpressionError for what has not the
    form that `resolved` reads; a value that the server can judge is left to it."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_regex: str | Sequence[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    dtype: str | type | None = None
    regex: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    ebnf: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None  # by token id
    sampling_seed: int | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_regex"):
            _check_list(name, getattr(self, name), str, "a text or a list of texts")
            for text in as_tuple(getattr(self, name)):
                check_text(text)
        _check_list("stop_token_ids", self.stop_token_ids, int, "a list of token ids")
        for name, kind, words in _FORMS:
            if not isinstance(value := getattr(self, name), kind | None):
                raise ExpressionError(f"{name} must be {words}, got {written(value)}.")
            if isinstance(value, str):
                check_text(value)

    def over(self, base: Sampling) -> Sampling:
        """What is said here, and the rest of `base`."""
        return dataclasses.replace(base, **self.said())

    def said(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def resolved(self, stops: Sequence[str] = ()) -> Sampling:
        """Every default filled in, dtype as the regex and stops that it means, a schema as text,
        the chat template's own `stops` behind.

        Raises DtypeError.
        """
        said = self.over(DEFAULTS)
        stop, regex = as_tuple(said.stop), said.regex
        if said.dtype is not None:
            name = dtype_name(said.dtype)
            regex = _REGEX[name]
            stop += _NUMBER_STOPS if name in ("int", "float") else ()
        return dataclasses.replace(
            said,
            stop=tuple(dict.fromkeys((*stop, *stops))),
            stop_regex=as_tuple(said.stop_regex),
            stop_token_ids=tuple(said.stop_token_ids or ()),
            dtype=None,
            regex=regex,
            json_schema=_as_text("json_schema", said.json_schema),
            structural_tag=_as_text("structural_tag", said.structural_tag),
        )

    @property
    def constraint(self) -> str | None:
        """In words, what the text must look like."""
        if self.dtype is not None:
            return f"dtype {dtype_name(self.dtype)}"
        if self.regex is not None:
            return f"regex {self.regex}"
        said = (name for name in SYNTAXES if getattr(self, name) not in (None, False))
        return next(said, None)

    def to_native(self) -> dict[str, Any]:
        """SGLang's `sampling_params`, of what `resolved` gave."""
        names = (
            *("max_new_tokens", "min_new_tokens", "n", "temperature", "top_p", "top_k", "min_p"),
            *("frequency_penalty", "presence_penalty", "ignore_eos"),
        )
        params = {name: getattr(self, name) for name in names}
        for name in ("stop", "stop_token_ids", "stop_regex"):
            params[name] = list(getattr(self, name))
        for name in ("regex", *SYNTAXES, *_AS_SAID):
            if (value := getattr(self, name)) is not None:
                params[name] = value
        if self.logit_bias is not None:
            params["logit_bias"] = _keyed(self.logit_bias)
        return params

    def to_openai(self) -> dict[str, Any]:
        """OpenAI's fields, those of SGLang's extensions only where they ask for something."""
        body: dict[str, Any] = {
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "n": self.n,
        }
        if self.stop:
            body["stop"] = list(self.stop)
        idle = dataclasses.asdict(DEFAULTS)
        names = {"min_new_tokens": "min_tokens", "sampling_seed": "seed"} | {
            name: name
            for name in (
                *("frequency_penalty", "presence_penalty", "top_k", "min_p", "ignore_eos"),
                *("stop_token_ids", "stop_regex", "regex", "ebnf", "structural_tag"),
                *("repetition_penalty", "no_stop_trim", "skip_special_tokens"),
            )
        }
        for name, theirs in names.items():
            value = getattr(self, name)
            if value is not None and value != idle[name] and value != ():
                body[theirs] = value
        if self.logit_bias:
            body["logit_bias"] = _keyed(self.logit_bias)
        if self.json_schema is not None:
            schema = schema_value(str(self.json_schema))
            wanted = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        elif self.json_object:
            body["response_format"] = {"type": "json_object"}
        return body


DEFAULTS = Sampling(
    max_new_tokens=128,
    min_new_tokens=0,
    n=1,
    stop=(),
    stop_token_ids=(),
    stop_regex=(),
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    ignore_eos=False,
)
FIELDS = tuple(field.name for field in dataclasses.fields(Sampling))


def dtype_name(dtype: str | type) -> str:
    """Raises DtypeError."""
    name = _DTYPES.get(dtype) if isinstance(dtype, str | type) else None
    if name is None:
        raise DtypeError(f"dtype must be int, float, bool or str, got {written(dtype)}.")
    return name


def schema_value(text: str) -> Any:
    """A schema as JSON, SGLang's name for any value too. Raises ValueError."""
    return {} if text == "$$ANY$$" else json.loads(text)


def _as_text(name: str, value: str | Mapping[str, Any] | None) -> str | None:
    if not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(value)
    except (RecursionError, TypeError, ValueError) as error:
        raise ExpressionError(f"{name} cannot be written as JSON: {error}.") from None


def _keyed(bias: Mapping[int, float]) -> dict[str, float]:
    """As JSON has it."""
    return {str(token): value for token, value in bias.items()}
