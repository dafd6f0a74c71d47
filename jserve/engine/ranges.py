"""The ranges of sampling parameters: SGLang's, in its wording."""

from __future__ import annotations

from jserve.errors import RequestError
from jserve.types import (
    MAX_LOGIT_BIAS,
    MAX_OWN_STOP_TOKEN_IDS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    TOP_K_ALL,
    SamplingParams,
)

INT32_MAX = 2**31 - 1
MAX_FLOAT = 1e30  # far enough from float32's largest, 3.4e38, for sums on the device to stay finite


def check_ranges(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError naming the first field that is out of range. Integers that reach the
    device are int32 there."""

    def check(name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise RequestError(f"{name} must be {rule}, got {getattr(sampling, name)}.", name)

    for name, least in (("max_new_tokens", 0), ("min_new_tokens", 0), ("stream_interval", 1)):
        if (value := getattr(sampling, name)) is not None:
            check(name, value >= least, f">= {least}")
            check(name, value <= INT32_MAX, f"<= {INT32_MAX}")
    check("temperature", 0.0 <= sampling.temperature <= MAX_FLOAT, f"in [0, {MAX_FLOAT:g}]")
    check("top_p", 0.0 < sampling.top_p <= 1.0, "in (0, 1]")
    all_or_some = sampling.top_k == -1 or 1 <= sampling.top_k <= TOP_K_ALL
    check("top_k", all_or_some, f"-1 (all) or in [1, {TOP_K_ALL}]")
    check("min_p", 0.0 <= sampling.min_p <= 1.0, "in [0, 1]")
    check("frequency_penalty", -2.0 <= sampling.frequency_penalty <= 2.0, "in [-2, 2]")
    check("presence_penalty", -2.0 <= sampling.presence_penalty <= 2.0, "in [-2, 2]")
    check("repetition_penalty", 0.0 < sampling.repetition_penalty <= 2.0, "in (0, 2]")
    limit = sampling.max_new_tokens
    within = limit is None or sampling.min_new_tokens <= limit
    check("min_new_tokens", within, f"<= max_new_tokens ({limit})")
    check("n", 1 <= sampling.n <= 128, "in [1, 128]")
    check("stop", len(sampling.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings")
    fit = all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in sampling.stop)
    check("stop", fit, f"non-empty strings of at most {MAX_STOP_CHARACTERS} characters")
    ids, bias, most = sampling.stop_token_ids, sampling.logit_bias, MAX_OWN_STOP_TOKEN_IDS
    check("stop_token_ids", len(ids) <= most, f"at most {most} ids")
    known, range_ = range(vocab_size), f"in [0, {vocab_size})"
    check("stop_token_ids", all(token in known for token in ids), f"ids {range_}")
    check("logit_bias", len(bias) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} entries")
    check("logit_bias", all(token in known for token in bias), f"keyed by ids {range_}")
    small = all(abs(value) <= MAX_FLOAT for value in bias.values())
    check("logit_bias", small, f"finite, of magnitude <= {MAX_FLOAT:g}")
    seed = sampling.sampling_seed
    check("sampling_seed", seed is None or -(2**63) <= seed < 2**63, "an int64")
