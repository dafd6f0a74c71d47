"""A request's sampling parameters and their ranges."""

from __future__ import annotations

import msgspec

from jserve.errors import RequestError

# Static caps of per-request lists that live in device state; beyond them the answer is 400, never a
# compile. MAX_STOP_TOKEN_IDS counts the model's own EOS ids.
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 64
MAX_STOP_STRINGS = 32
TOP_K_ALL = 1 << 30

INT32_MAX = 2**31 - 1
MAX_FLOAT = 1e30  # far enough from float32's largest, 3.4e38, for sums on the device to stay finite
_MAX_OWN_STOP_TOKEN_IDS = MAX_STOP_TOKEN_IDS - 8


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
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    sampling_seed: int | None = None  # any int64; None: drawn at admission
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-6 or self.top_k == 1

    @property
    def needs_full_sampler(self) -> bool:
        """Whether a row needs more than argmax of its logits."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty)
        changed = bool(self.logit_bias) or self.min_new_tokens > 0
        return not self.greedy or penalties != (0.0, 0.0, 1.0) or changed

    def verify(self, vocab_size: int) -> None:
        """Raise RequestError naming the first field that is out of range (SGLang's ranges and its
        wording; integers that reach the device are int32 there)."""

        def check(name: str, ok: bool, rule: str) -> None:
            if not ok:
                raise RequestError(f"{name} must be {rule}, got {getattr(self, name)}.", name)

        for name, least in (("max_new_tokens", 0), ("min_new_tokens", 0), ("stream_interval", 1)):
            if (value := getattr(self, name)) is not None:
                check(name, value >= least, f">= {least}")
                check(name, value <= INT32_MAX, f"<= {INT32_MAX}")
        check("temperature", 0.0 <= self.temperature <= MAX_FLOAT, f"in [0, {MAX_FLOAT:g}]")
        check("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]")
        all_or_some = self.top_k == -1 or 1 <= self.top_k <= TOP_K_ALL
        check("top_k", all_or_some, f"-1 (all) or in [1, {TOP_K_ALL}]")
        check("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]")
        check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]")
        check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]")
        check("repetition_penalty", 0.0 < self.repetition_penalty <= 2.0, "in (0, 2]")
        limit = self.max_new_tokens
        within = limit is None or self.min_new_tokens <= limit
        check("min_new_tokens", within, f"<= max_new_tokens ({limit})")
        check("n", 1 <= self.n <= 128, "in [1, 128]")
        check("stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings")
        check("stop", all(self.stop), "non-empty strings")
        ids, bias, most = self.stop_token_ids, self.logit_bias, _MAX_OWN_STOP_TOKEN_IDS
        check("stop_token_ids", len(ids) <= most, f"at most {most} ids")
        known, range_ = range(vocab_size), f"in [0, {vocab_size})"
        check("stop_token_ids", all(token in known for token in ids), f"ids {range_}")
        check("logit_bias", len(bias) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} entries")
        check("logit_bias", all(token in known for token in bias), f"keyed by ids {range_}")
        small = all(abs(value) <= MAX_FLOAT for value in bias.values())
        check("logit_bias", small, f"finite, of magnitude <= {MAX_FLOAT:g}")
        seed = self.sampling_seed
        check("sampling_seed", seed is None or -(2**63) <= seed < 2**63, "an int64")
