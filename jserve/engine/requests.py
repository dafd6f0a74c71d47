"""Arguments of the Python API → GenerateRequests: strict types, batches expanded.

Knows names, types and broadcasting (SGLang's); nothing is dropped silently. Leaves ranges to
SamplingParams.verify and lengths to the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from jserve.engine.sampling_params import sampling_from_dict
from jserve.errors import RequestError
from jserve.types import GenerateRequest
from jserve.types.wording import lone_surrogate, plain_types

#: What a LogprobParams is made of: the name of each argument, and its value that asks for nothing.
_LOGPROBS: dict[str, tuple[str, Any]] = {
    "start_len": ("logprob_start_len", -1),
    "top_num": ("top_logprobs_num", 0),
    "token_ids": ("token_ids_logprob", ()),
}


def expand(
    prompt: str | list[str] | None = None,
    sampling_params: Mapping[str, Any] | list[Mapping[str, Any]] | None = None,
    input_ids: list[int] | list[list[int]] | None = None,
    *,
    return_logprob: bool | list[bool] = False,
    logprob_start_len: int | list[int | None] | None = None,
    top_logprobs_num: int | list[int] | None = None,
    token_ids_logprob: list[int] | list[list[int] | None] | None = None,
    return_text_in_logprobs: bool = False,
    stream: bool = False,
    rid: str | list[str] | None = None,
    extra_key: str | list[str | None] | None = None,
    cache_salt: str | list[str | None] | None = None,
    priority: int | list[int | None] | None = None,
    routed_dp_rank: int | list[int | None] | None = None,
    data_parallel_rank: int | list[int | None] | None = None,
    log_metrics: bool = True,
    no_logs: bool = False,
    require_reasoning: bool = False,
) -> tuple[list[GenerateRequest], bool]:
    """(one request a prompt, whether the answer is a list of bodies).

    Scalars hold for every prompt, lists have one value a prompt; a scalar that says which
    log-probabilities are wanted holds for those prompts of which any are. `data_parallel_rank` is
    an old name of `routed_dp_rank`.
    """
    if (prompt is None) == (input_ids is None):
        raise RequestError("Exactly one of prompt and input_ids must be given.", "prompt")
    given, field = (prompt, "text") if input_ids is None else (input_ids, "input_ids")
    batch = isinstance(prompt, list) or _nested(input_ids)
    prompts: list[Any] = given if batch else [given]  # type: ignore[assignment]
    size = len(prompts)
    if not size:
        raise RequestError("prompt must not be an empty list.", "prompt")
    if batch and isinstance(rid, str):
        rid = [f"{rid}_{i}" for i in range(size)]
    ids = _one_value(token_ids_logprob)
    scored = _scored(return_logprob, size)
    rank = one_rank(routed_dp_rank, data_parallel_rank)
    columns = {
        field: prompts,
        "sampling_params": _column("sampling_params", sampling_params, size),
        "return_logprob": scored,
        "start_len": _where("logprob_start_len", logprob_start_len, scored),
        "top_num": _where("top_logprobs_num", top_logprobs_num, scored),
        "token_ids": _where("token_ids_logprob", ids, scored),
        "rid": _column("rid", rid, size),
        "extra_key": _column("extra_key", extra_key, size),
        "cache_salt": _column("cache_salt", cache_salt, size),
        "priority": _column("priority", priority, size),
        "routed_dp_rank": _column("routed_dp_rank", rank, size),
    }
    common = {"stream": stream, "return_text_in_logprobs": return_text_in_logprobs}
    common |= {"log_metrics": log_metrics, "no_logs": no_logs}
    common |= {"require_reasoning": require_reasoning}
    rows = zip(*columns.values(), strict=True)
    requests = [_request(common | dict(zip(columns, row, strict=True))) for row in rows]
    return requests, batch or requests[0].sampling.n > 1


def _nested(ids: Any) -> bool:
    return isinstance(ids, list) and any(isinstance(one, list) for one in ids)


def one_rank(rank: Any, old: Any) -> Any:
    """What `routed_dp_rank` and its old name ask for together. Raises RequestError."""
    if rank is not None and old is not None and rank != old:
        message = "routed_dp_rank and data_parallel_rank differ; give one."
        raise RequestError(message, "data_parallel_rank")
    return old if rank is None else rank


def check_ranks(requests: Iterable[GenerateRequest], num_ranks: int) -> None:
    """Raises RequestError for a rank that there never was."""
    for request in requests:
        if request.routed_dp_rank not in (None, *range(num_ranks)):
            rule = f"must be in [0, {num_ranks - 1}], got {request.routed_dp_rank}."
            raise RequestError(f"routed_dp_rank {rule}", "routed_dp_rank")


def _request(fields: dict[str, Any]) -> GenerateRequest:
    """One GenerateRequest of one value an argument, types checked."""
    sampling = sampling_from_dict(fields.pop("sampling_params"))
    given = {name: value for name in _LOGPROBS if (value := fields.pop(name)) is not None}
    logprobs = given if fields.pop("return_logprob") else None
    for name, (argument, nothing) in _LOGPROBS.items():
        if logprobs is None and given.get(name, nothing) not in (nothing, []):
            raise RequestError(f"{argument} needs return_logprob: true.", argument)
    for name in ("extra_key", "cache_salt"):
        fields[name] = fields[name] or None
    for name, value in {**fields, **msgspec.structs.asdict(sampling)}.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and lone_surrogate(text):
                raise RequestError(f"{name} must not hold lone surrogates.", name)
    try:
        return msgspec.convert(
            {**fields, "sampling": sampling, "logprobs": logprobs}, GenerateRequest
        )
    except msgspec.ValidationError as error:
        problem, _, path = str(error).rstrip("`").partition(" - at `$.")
        name = re.split(r"[.\[]", path)[0] or None
        raise RequestError(f"{path or 'request'}: {plain_types(problem)}.", name) from None


def _scored(value: Any, size: int) -> list[Any]:
    """The column of return_logprob, null as false. Raises RequestError."""
    column = [False if one is None else one for one in _column("return_logprob", value, size)]
    if wrong := [one for one in column if type(one) is not bool]:
        rule = f"return_logprob must be true or false, got {wrong[0]!r}."
        raise RequestError(rule, "return_logprob")
    return column


def _one_value(ids: Any) -> Any:
    """A list of nothing but token ids is for every prompt."""
    ids = () if ids is None else ids
    plain = isinstance(ids, list | tuple) and all(type(token) is int for token in ids)
    return tuple(ids) if plain else ids


def _where(name: str, value: Any, scored: list[Any]) -> list[Any]:
    """The column of what says which log-probabilities are wanted: one value for all is for the rows
    that are `scored`, if any is."""
    column = _column(name, value, len(scored))
    if isinstance(value, list) or not any(scored):
        return column
    return [one if wanted else None for one, wanted in zip(column, scored, strict=True)]


def _column(name: str, value: Any, size: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * size
    if len(value) != size:
        raise RequestError(f"{name} must have one value a prompt ({size}), got {len(value)}.", name)
    return value
