"""Streaming text: whole characters only, stop strings whatever the cuts, and work that does not
grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.config import ModelOptions
from jserve.tokenizer import stop_strings
from jserve.tokenizer.detokenizer import Detokenizer
from jserve.tokenizer.loader import load_tokenizer
from jserve.tokenizer.sources import byte_source
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import SamplingParams
from jserve.weights.checkpoint import Checkpoint, open_checkpoint

BYTES = Tokenizer(byte_source(300, eos=[299]))
SMOLLM2 = load_tokenizer(open_checkpoint(ModelOptions(model_path="smollm2-135m")))
SPM = load_tokenizer(
    Checkpoint(
        "gguf",
        Path(),
        {},
        {},
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [
                "<unk>",
                *(f"<0x{b:02X}>" for b in range(256)),
                "▁",
                "é",
                "▁é",
            ],
            "tokenizer.ggml.token_type": [2, *[6] * 256, 1, 1, 1],
            "tokenizer.ggml.scores": [0.0] * 257 + [-2.0, -3.0, -1.0],
            "tokenizer.ggml.add_bos_token": False,
        },
    )
)
TOKENIZERS = {"bytes": BYTES, "smollm2": SMOLLM2, "spm": SPM}

TEXTS = st.lists(
    st.sampled_from(
        [
            "hello ",
            "Grüße",
            "日本語のテキスト",
            "مرحبا بالعالم",
            "नमस्ते",
            "🎉",
            "👩‍👩‍👧‍👦",
            "\n\n",
            "é",
            "e\u0301",
            "  ",
            "ab",
            "a",
            "b",
        ]
    ),
    max_size=12,
).map("".join)
CHUNKS = st.lists(st.integers(1, 7), max_size=30)
STOPS = st.lists(st.text("ab\n 🎉é", min_size=1, max_size=4), max_size=4).map(tuple)


def chunked(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    chunks, position = [], 0
    for size in [*sizes, len(ids)]:
        if chunk := list(ids[position : position + size]):
            chunks.append(chunk)
        position += size
    return chunks


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, int] | None:
    """By brute force: the string that is complete first, the longest of those, and its end."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return max(ending, key=len), end
    return None


def continuation(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of `ids` behind a prompt."""
    prompt = tokenizer.encode("a")
    return tokenizer.decode([*prompt, *ids])[len("a") :]


@settings(max_examples=150, deadline=None)
@given(
    text=TEXTS,
    sizes=CHUNKS,
    stops=STOPS,
    name=st.sampled_from(sorted(TOKENIZERS)),
    trim=st.booleans(),
)
def test_pieces_join_to_the_whole_text_up_to_the_stop(
    text: str, sizes: list[int], stops: tuple[str, ...], name: str, trim: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special=False)
    whole = continuation(tokenizer, ids)
    found = first_stop(whole, stops)
    expected = whole
    if found is not None:
        expected = whole[: found[1] - len(found[0])] if trim else whole[: found[1]]
    stream = Detokenizer(tokenizer, SamplingParams(stop=stops, no_stop_trim=not trim))
    shown = ""
    for chunk in chunked(ids, sizes):
        shown += stream.push(chunk)
        assert expected.startswith(shown)
    shown += stream.finish(stop_token=False)
    assert shown == expected
    assert stream.stopped == (None if found is None else found[0])
    if found is None:
        assert stream.num_tokens_used == len(ids)
    else:
        used = stream.num_tokens_used
        assert first_stop(continuation(tokenizer, ids[:used]), stops) == found
        assert first_stop(continuation(tokenizer, ids[: used - 1]).rstrip("\ufffd"), stops) is None
        assert stream.push([1, 2]) == stream.finish(stop_token=False) == ""


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=40), sizes=CHUNKS)
def test_bytes_that_are_no_text_give_the_same_in_pieces(data: bytes, sizes: list[int]) -> None:
    stream = Detokenizer(BYTES, SamplingParams())
    pieces = [stream.push(chunk) for chunk in chunked(list(data), sizes)]
    assert "".join(pieces) + stream.finish(stop_token=False) == data.decode("utf-8", "replace")


def test_a_character_is_shown_when_its_last_byte_is_there() -> None:
    stream = Detokenizer(BYTES, SamplingParams())
    assert [stream.push([byte]) for byte in "é🎉".encode()] == ["", "é", "", "", "", "🎉"]
    assert stream.push([0xF0]) == ""
    assert stream.finish(stop_token=False) == "\ufffd"


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    stream = Detokenizer(BYTES, SamplingParams(stop=("ENDED", "ND!")))
    assert [stream.push(list(piece.encode())) for piece in ("so E", "N", "D", "x", "EN")] == [
        "so ", "", "", "ENDx", "",
    ]  # fmt: skip
    assert stream.finish(stop_token=False) == "EN"
    assert stream.stopped is None


def test_a_stop_string_across_chunks_is_trimmed_or_kept() -> None:
    for keep, expected in ((False, "a"), (True, "aEND")):
        stream = Detokenizer(BYTES, SamplingParams(stop=("END",), no_stop_trim=keep))
        shown = "".join(stream.push(list(piece.encode())) for piece in ("aE", "N", "D tail"))
        assert shown == expected
        assert (stream.stopped, stream.num_tokens_used) == ("END", 4)


def test_the_stop_token_is_trimmed_like_a_stop_string() -> None:
    sampling = SamplingParams(stop_token_ids=(ord("!"),), skip_special_tokens=False)
    stream = Detokenizer(BYTES, sampling)
    assert stream.push(list(b"a!")) == "a"
    assert stream.push(list(b"b!")) == "!b"  # the first did not end the text
    assert stream.finish(stop_token=True) == ""
    assert stream.num_tokens_used == 4
    kept = Detokenizer(BYTES, SamplingParams(stop_token_ids=(ord("!"),), no_stop_trim=True))
    assert kept.push(list(b"a!")) + kept.finish(stop_token=True) == "a!"
    for ignore, shown in ((False, "a"), (True, "a<299>")):
        stream = Detokenizer(BYTES, SamplingParams(ignore_eos=ignore))
        assert stream.push([ord("a"), 299]) == shown


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [1, *SMOLLM2.encode("hi"), 0]
    for skip, expected in ((True, "hi"), (False, "<|im_start|>hi<|endoftext|>")):
        stream = Detokenizer(SMOLLM2, SamplingParams(skip_special_tokens=skip))
        assert stream.push(ids) + stream.finish(stop_token=False) == expected


def test_each_token_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = Tokenizer.pieces

    def counting(self: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> list[bytes]:
        seen.extend(ids)
        return original(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "pieces", counting)
    ids = SMOLLM2.encode("one two three " * 50)
    for stops in ((), ("never there",)):
        seen.clear()
        stream = Detokenizer(SMOLLM2, SamplingParams(stop=stops))
        for token in ids:
            stream.push([token])
        stream.finish(stop_token=False)
        assert seen == ids


def test_of_a_stop_string_only_what_a_text_begins_is_worked_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worked_out: list[str] = []
    original = stop_strings._next_failure

    def counting(stop: str, failures: Sequence[int]) -> int:
        worked_out.append(stop[0])
        return original(stop, failures)

    monkeypatch.setattr(stop_strings, "_next_failure", counting)
    sampling = SamplingParams(stop=tuple(letter + "ba" * 2_000 for letter in "ABCDEFGH"))
    streams = [Detokenizer(BYTES, sampling) for _ in range(64)]
    assert not worked_out
    assert streams[0].push(list(b"Ababab Bbabax")) == "Ababab Bbabax"
    assert "".join(worked_out) == "AAAAAABBBBB"
    assert streams[0].push(list(("x" + sampling.stop[2] + "y").encode())) == "x"
    assert streams[0].stopped == sampling.stop[2]


def test_a_long_stop_string_that_nearly_matches_costs_little() -> None:
    """Quadratic work would be 10⁸ comparisons here; the matcher looks at each character a few
    times.
    """
    stream = Detokenizer(BYTES, SamplingParams(stop=("a" * 10_000 + "b",)))
    shown = [stream.push([ord("a")]) for _ in range(10_500)]
    assert sum(map(len, shown)) == 500
    assert stream.push([ord("b")]) == ""
    assert stream.stopped is not None
