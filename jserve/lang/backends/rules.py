"""What an engine refuses of a call, and which answers its grammars allow: the engine's own checks,
for a backend that has no engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from jserve.engine.ranges import check_ranges
from jserve.engine.sampling_params import sampling_from_dict
from jserve.errors import RequestError
from jserve.grammar.backend import Backend, GrammarError, Template, Vocabulary
from jserve.grammar.choice import make_backend
from jserve.grammar.spec import spec_of
from jserve.lang.sampling import Sampling
from jserve.tokenizer.stop_regex import check_stop_regexes
from jserve.types import GrammarSpec, LogprobParams

#: Whether a text is a whole answer.
Allows = Callable[[str], bool]

_VOCAB_SIZE = 1 << 31  # of no model: any id will do
_END = 256  # the token behind those of bytes


def allowed_by(sampling: Sampling, prompt_len: int) -> Allows:
    """Which answers a call takes, of what `resolved` gave. Raises RequestError naming the field for
    a call that an engine would not take."""
    params = sampling_from_dict(sampling.to_native())
    check_ranges(params, _VOCAB_SIZE)
    check_stop_regexes(params.stop_regex)
    if sampling.return_logprob:
        start, top = sampling.logprob_start_len, sampling.top_logprobs_num
        wanted = LogprobParams(start_len=-1 if start is None else start, top_num=top or 0)
        wanted.verify(prompt_len, _VOCAB_SIZE)
    spec = spec_of(json_schema=params.json_schema, regex=params.regex)
    return _anything if spec is None else functools.partial(_matches, _template(spec))


def _anything(text: str) -> bool:
    return True


@functools.lru_cache(256)
def _template(spec: GrammarSpec) -> Template:
    backend = _backend()
    try:
        return backend.load(backend.compile(spec))
    except GrammarError as error:
        field = "regex" if spec.kind == "regex" else "json_schema"
        raise RequestError(f"Failed to compile {field} grammar: {error}.", field) from None


@functools.cache
def _backend() -> Backend:
    """Tokens are bytes."""
    tokens: Sequence[bytes] = [bytes([byte]) for byte in range(_END)]
    return make_backend("llguidance", Vocabulary((*tokens, b""), _END + 1, (_END,)))


def _matches(template: Template, text: str) -> bool:
    matcher = template.fork()
    if not all(matcher.accept(byte) for byte in text.encode()):
        return False
    return matcher.finished or matcher.accept(_END)
