"""The words of the language: functions that make expressions."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Unpack, get_type_hints

from jserve.errors import RequestError
from jserve.grammar.backend import GrammarError
from jserve.grammar.regex_syntax import whole_match
from jserve.lang import choices as methods
from jserve.lang import ir
from jserve.lang.choices import ChoicesMethod
from jserve.lang.errors import ExpressionError
from jserve.lang.sampling import SYNTAXES, MoreArguments, Sampling, dtype_name
from jserve.lang.shown import check_text
from jserve.lang.site import caller
from jserve.parsers.reasoning import check_model_type
from jserve.types.wording import nearest_name, written


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: str | type | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    **more: Unpack[MoreArguments],
) -> ir.Expr:
    """Text that the model writes here, as variable `name`; what is not given is run()'s. Raises
    DtypeError, ExpressionError.

    Args:
        dtype: int, float, bool or str (in quotes): text of that form; it wins over `regex`.
        choices: as `select`; only temperature and choices_method go with it.
        regex, json_schema; ebnf, structural_tag or json_object of `more`: what the text matches.
    """
    sampling = Sampling(
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        n=n,
        stop=stop,
        stop_token_ids=stop_token_ids,
        stop_regex=stop_regex,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        ignore_eos=ignore_eos,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs,
        dtype=dtype,
        regex=regex,
        json_schema=json_schema,
        **_known(more),
    )
    if choices is not None:
        return _chosen(name, choices, choices_method, sampling)
    return ir.Gen(name, _checked(sampling, choices_method), caller())


def _known(more: MoreArguments) -> MoreArguments:
    """Raises ExpressionError."""
    if wrong := [name for name in more if name not in _MORE]:
        near = nearest_name(wrong[0], inspect.signature(gen).parameters.keys() | _MORE)
        hint = f"; did you mean {near}?" if near else "."
        raise ExpressionError(f"gen has no parameter {wrong[0]}{hint}")
    return more


_MORE = get_type_hints(MoreArguments).keys()
#: Sampling parameters that gen calls otherwise.
_OWN_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


def _chosen(
    name: str | None, choices: Sequence[str], method: ChoicesMethod | None, sampling: Sampling
) -> ir.Expr:
    """gen with choices. Nothing is generated, so what says how would go unheard."""
    if dropped := [one for one in sampling.said() if one != "temperature"]:
        lost = ", ".join(_OWN_NAMES.get(one, one) for one in dropped)
        raise ExpressionError(
            f"gen: {lost} cannot go with choices, which are only scored; leave one of them out."
        )
    return select(name, choices, sampling.temperature or 0.0, method or _DEFAULT_METHOD)


def _checked(sampling: Sampling, method: ChoicesMethod | None) -> Sampling:
    """One form at most, a regex by the rules of the server's own grammars."""
    if method is not None:
        raise ExpressionError("gen: choices_method needs choices.")
    syntaxes = [name for name in SYNTAXES if getattr(sampling, name) not in (None, False)]
    if len(syntaxes) > 1 or (syntaxes and not sampling.dtype is sampling.regex is None):
        others = ", ".join(syntaxes[1:]) or "regex or dtype"
        raise ExpressionError(f"gen: give {syntaxes[0]}, or {others}, not both.")
    if sampling.dtype is not None and sampling.regex is not None:
        kind = dtype_name(sampling.dtype)
        warnings.warn(f"gen: dtype {kind} wins over regex", stacklevel=3)
    elif sampling.dtype is not None:
        dtype_name(sampling.dtype)
    if sampling.regex is not None:
        try:
            if not sampling.regex:
                raise GrammarError("it is empty")
            whole_match(sampling.regex)
        except (GrammarError, RecursionError) as error:
            message = f"gen: regex {sampling.regex!r} cannot be used: {error}."
            raise ExpressionError(message) from None
    return sampling


def gen_int(name: str | None = None, max_tokens: int | None = None, **sampling: Any) -> ir.Expr:
    """gen with dtype int: an integer as text. `sampling`: gen's other parameters of a number."""
    return _typed("gen_int", int, name, max_tokens, sampling)


def gen_string(name: str | None = None, max_tokens: int | None = None, **sampling: Any) -> ir.Expr:
    """gen with dtype str: a text in quotes."""
    return _typed("gen_string", str, name, max_tokens, sampling)


_NOT_TYPED = {"min_tokens", "dtype", "choices", "choices_method", "regex", *SYNTAXES}


def _typed(
    what: str, dtype: type, name: str | None, max_tokens: int | None, sampling: dict[str, Any]
) -> ir.Expr:
    if wrong := _NOT_TYPED & sampling.keys():
        raise ExpressionError(f"{what} takes no {min(wrong)}.")
    return gen(name, max_tokens, dtype=dtype, **sampling)


def select(
    name: str | None = None,
    choices: Iterable[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod = methods.token_length_normalized,
) -> ir.Expr:
    """The likeliest of `choices`, as variable `name`. Raises ExpressionError without choices."""
    given: tuple[str, ...] = ()
    if isinstance(choices, Iterable) and not isinstance(choices, str):
        given = tuple(choices)  # once: it may be a generator
    if not given or not all(isinstance(one, str) for one in given):
        raise ExpressionError(f"select needs a list of texts as choices, got {written(choices)}.")
    for one in given:
        check_text(one)
    if not isinstance(choices_method, ChoicesMethod):
        names = (
            "token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized"
        )
        raise ExpressionError(
            f"choices_method must be one of {names}, got {written(choices_method)}."
        )
    return ir.Select(name, given, temperature, choices_method, caller())


_DEFAULT_METHOD = methods.token_length_normalized


def image(expr: Any) -> NoReturn:
    """Refused: no model with vision is served yet."""
    raise ExpressionError("image: no model that sees is served; say in words what it shows.")


def video(path: Any, num_frames: int = 1) -> NoReturn:
    """Refused, as `image`."""
    raise ExpressionError("video: no model that sees is served; say in words what it shows.")


def role_expr(role: str, expr: Any = None) -> ir.ExprList:
    inner = () if expr is None else ir.parts(ir.as_expr(expr))
    return ir.ExprList((ir.RoleBegin(role), *inner, ir.RoleEnd(role)))


def system(expr: Any = None) -> ir.ExprList:
    """A system message."""
    return role_expr("system", expr)


def user(expr: Any = None) -> ir.ExprList:
    """A user's message."""
    return role_expr("user", expr)


def assistant(expr: Any = None) -> ir.ExprList:
    """An assistant's message, usually with a gen in it."""
    return role_expr("assistant", expr)


def system_begin() -> ir.Expr:
    return ir.RoleBegin("system")


def system_end() -> ir.Expr:
    return ir.RoleEnd("system")


def user_begin() -> ir.Expr:
    return ir.RoleBegin("user")


def user_end() -> ir.Expr:
    return ir.RoleEnd("user")


def assistant_begin() -> ir.Expr:
    return ir.RoleBegin("assistant")


def assistant_end() -> ir.Expr:
    return ir.RoleEnd("assistant")


def separate_reasoning(expr: Any, model_type: str) -> ir.Expr:
    """`expr`, whose variables keep the answer only; what the model thought before becomes
    `<name>_reasoning_content`. The text goes on with both. Raises ExpressionError.

    Args:
        model_type: deepseek-r1, deepseek-v3, qwen3 or qwen3-thinking.
    """
    try:
        check_model_type(model_type)
    except RequestError as error:
        raise ExpressionError(f"separate_reasoning: {error}") from None
    inner = ir.as_expr(expr)
    if any(isinstance(part, ir.SeparateReasoning) for part in ir.parts(inner)):
        raise ExpressionError("separate_reasoning: what it holds is separated already.")
    return ir.SeparateReasoning(inner, model_type, caller())
