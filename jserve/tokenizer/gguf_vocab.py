"""GGUF metadata → a `tokenizers` pipeline with the ids that the model was trained on.

Owns the pre-tokenizers by name and the rebuilding of SentencePiece merges. It reads no files.

Kinds of GGUF token: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jserve.errors import ConfigError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_BLANK_RUN = 7  # ours: see _with_blank_runs
_BLANK_RUN_SCORE = 1e9  # above every score of a vocabulary
_BLANK = "▁"  # stands for a blank in SentencePiece vocabularies

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + _WORD + r"|\p{N}" + _TAIL
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"

#: `tokenizer.ggml.pre` → the expressions that split the text, one after another.
_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "default": (_GPT2,),
    "smollm": (_DIGIT, _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
_ALIASES: Mapping[str, str] = {
    "": "default",
    "phi-2": "gpt-2",
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
    "exaone": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "stablelm2": "qwen2",
}
#: Vocabularies in which a whole word that is a token stays one, whatever the merges say.
_WHOLE_WORDS = frozenset({"llama-bpe", "tekken"})
_BOS_BY_DEFAULT = frozenset({"llama-bpe", "tekken"})


def build_pipeline(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The encoder and decoder that `tokenizer.ggml.*` describes.

    Raises ConfigError when the vocabulary is missing, of an unknown model, or wants an unknown
    pre-tokenizer.
    """
    tokens: list[str] | None = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ConfigError("the GGUF file holds no tokenizer; pass --tokenizer-path")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    model = metadata.get("tokenizer.ggml.model")
    if model not in builders:
        raise ConfigError(
            f"GGUF tokenizer {model!r} is not supported; known: {', '.join(builders)}"
        )
    kinds: Sequence[int] = [int(k) for k in metadata.get("tokenizer.ggml.token_type", ())]
    kinds = kinds or [_NORMAL] * len(tokens)
    if model == "llama":
        tokens, kinds = _with_blank_runs(tokens, kinds)
    pipeline, bos_by_default = builders[model](metadata, tokens, kinds)
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            tokenizers.AddedToken(token, special=special, normalized=False)
            for token, its_kind in zip(tokens, kinds, strict=True)
            if its_kind == kind and token
        ]
        (pipeline.add_special_tokens if special else pipeline.add_tokens)(added)
    _add_ends(pipeline, metadata, tokens, bos_by_default)
    return pipeline


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """BPE over bytes (GPT-2 and after). Returns the pipeline and whether it starts with BOS unless
    told.
    """
    name = str(metadata.get("tokenizer.ggml.pre", ""))
    name = _ALIASES.get(name, name)
    if name not in _PATTERNS:
        known = ", ".join(sorted({*_PATTERNS, *filter(None, _ALIASES)}))
        raise ConfigError(
            f"GGUF pre-tokenizer {name!r} is not supported; known: {known}. Pass --tokenizer-path"
        )
    merges = [_split_merge(merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
    pipeline = tokenizers.Tokenizer(
        models.BPE(_vocabulary(tokens), merges, ignore_merges=name in _WHOLE_WORDS)
    )
    if name == "qwen2":
        pipeline.normalizer = normalizers.NFC()
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in _PATTERNS[name]
    ]
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    pipeline.decoder = decoders.ByteLevel()
    return pipeline, name in _BOS_BY_DEFAULT


def _sentence_piece(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE (Llama 2, Gemma): blanks are ▁, unknown characters fall back to bytes."""
    unknown = tokens[int(metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    vocabulary = _vocabulary(tokens)
    merges = _merges_from_scores(tokens, kinds, metadata["tokenizer.ggml.scores"], vocabulary)
    pipeline = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    to_blank, from_blank = normalizers.Replace(" ", _BLANK), decoders.Replace(_BLANK, " ")
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        pipeline.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), to_blank])
        last = [decoders.Strip(" ", 1, 0)]
    else:
        pipeline.normalizer, last = to_blank, []
    pipeline.decoder = decoders.Sequence(
        [from_blank, decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return pipeline, True


def _with_blank_runs(tokens: Sequence[str], kinds: Sequence[int]) -> tuple[list[str], list[int]]:
    """Gemma's user-defined runs of blanks, as SentencePiece sees them: after blanks became ▁.

    Left as added tokens they would split the text before that, and a ▁ next to a blank would not
    join its run. As merges that beat all others, longest first, they take the longest run from the
    left, which is the rule.
    """
    runs = [
        kind == _USER_DEFINED and not token.strip(" ")
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    return (
        [_BLANK * len(token) if run else token for token, run in zip(tokens, runs, strict=True)],
        [_BLANK_RUN if run else kind for kind, run in zip(kinds, runs, strict=True)],
    )


def _merges_from_scores(
    tokens: Sequence[str],
    kinds: Sequence[int],
    scores: Sequence[float],
    vocabulary: Mapping[str, int],
) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: so every split of a token is a
    merge, best first.
    """
    merges: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(tokens, kinds, scores, strict=True):
        if kind == _BLANK_RUN:
            score = _BLANK_RUN_SCORE + len(token)
        elif kind != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-float(score), vocabulary[left], vocabulary[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")  # a merge may start with a blank of its own
    return merge[0] + left, right


def _add_ends(
    pipeline: tokenizers.Tokenizer,
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    bos_by_default: bool,
) -> None:
    """BOS before and EOS after the text, as the metadata says."""
    ends = {
        kind: int(metadata[f"tokenizer.ggml.{kind}_token_id"])
        for kind, default in (("bos", bos_by_default), ("eos", False))
        if metadata.get(f"tokenizer.ggml.add_{kind}_token", default)
        and f"tokenizer.ggml.{kind}_token_id" in metadata
    }
    if not ends:
        return
    template = [tokens[ends["bos"]]] if "bos" in ends else []
    template += ["$A", *([tokens[ends["eos"]]] if "eos" in ends else [])]
    pipeline.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(tokens[i], i) for i in sorted(set(ends.values()))]
    )
