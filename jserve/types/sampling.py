"""A request's sampling parameters. Their ranges are engine/ranges.py's to check."""

from __future__ import annotations

import msgspec

# Static caps of per-request lists that live in device state; beyond them the answer is 400, never a
# compile. MAX_STOP_TOKEN_IDS counts the model's own EOS ids, at most MAX_EOS_TOKEN_IDS.
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 64
MAX_EOS_TOKEN_IDS = 8
MAX_OWN_STOP_TOKEN_IDS = MAX_STOP_TOKEN_IDS - MAX_EOS_TOKEN_IDS  # a request's
MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 4096  # of each string
TOP_K_ALL = 1 << 30


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """SGLang's native sampling parameters. `None` was resolved to the default before this record is
    built.

    `temperature` < 1e-6 means greedy. `top_k` −1 means all. Stop strings and regexes are the API
    process's business (it sees text); everything else is the engine's.
    """

    max_new_tokens: int | None = 128  # None: up to the context length
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    sampling_seed: int | None = None  # any int64; None: drawn at admission
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    # what the answer must follow: one of them at most; "" and None are no grammar
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    syntax_field: str = ""  # what its caller calls that one, where it is not the name here
