"""For any tokens and any cuts: streamed text equals the text decoded at once, cut at the stop.

Tokens are drawn at random from whole vocabularies, so most characters are split over tokens, and
many bytes are no text at all. Each property counts what it is about, and fails if that never came.
"""

from __future__ import annotations

import codecs
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tokenizer_detokenizer import SMOLLM2, SPM, chunked, first_stop
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jserve.config import ServerOptions
from jserve.engine.sequence import Sequence as OneSequence
from jserve.metrics.meter import NO_METER
from jserve.tokenizer.detokenizer import Detokenizer
from jserve.tokenizer.sources import TokenizerSource
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import Delta, FinishReason, Output, SamplingParams, Submit

CORPUS = [
    "the cat sat on the mat and the dog ran after the cat, as dogs do",
    "Grüße aus Köln! Größe, Straße, naïve café, déjà vu, ¿qué? ¡sí!",
    "日本語のテキストと日本の文字 🎉🎉 👩‍👩‍👧‍👦 مرحبا بالعالم नमस्ते दुनिया",
    "def f(x):\n\treturn x ** 2  # squared\n\n\nprint(f(3))\n",
] * 3
SPECIAL = ["<s>", "</s>", "<|turn|>"]


def byte_level() -> Tokenizer:
    """BPE over bytes, as GPT-2, Llama 3 and Qwen have it; few merges, so characters are split."""
    pipeline = tokenizers.Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pipeline.train_from_iterator(CORPUS, trainer)
    return Tokenizer(TokenizerSource(pipeline, eos_token_ids=(1,)))


def sentence_piece() -> Tokenizer:
    """BPE over characters, ▁ for blanks, bytes for what is unknown: Llama 2 and Gemma have it."""
    pipeline = tokenizers.Tokenizer(models.BPE(unk_token="<s>", byte_fallback=True))
    pipeline.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    pipeline.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
        show_progress=False,
    )
    pipeline.train_from_iterator(CORPUS, trainer)
    tokens = [pipeline.id_to_token(i) for i in range(pipeline.get_vocab_size())]
    rebuilt = tokenizers.Tokenizer(pipeline.model)  # without the bytes as special tokens
    rebuilt.normalizer, rebuilt.decoder = pipeline.normalizer, pipeline.decoder
    rebuilt.add_special_tokens(SPECIAL)
    assert [rebuilt.id_to_token(i) for i in range(len(tokens))] == tokens
    return Tokenizer(TokenizerSource(rebuilt, eos_token_ids=(1,)))


TOKENIZERS = {"smollm2": SMOLLM2, "byte-level": byte_level(), "pieces": sentence_piece()}
TOKENIZERS["spm"] = SPM
NAMES = st.sampled_from(sorted(TOKENIZERS))
CUTS = st.lists(st.integers(1, 6), max_size=40)


def some_ids(name: str, seed: int, length: int) -> list[int]:
    """Tokens of real text, of any kind, and special ones."""
    tokenizer, rng = TOKENIZERS[name], random.Random(seed)
    ids: list[int] = []
    while len(ids) < length:
        if rng.random() < 0.4:
            text = rng.choice(CORPUS)
            start = rng.randrange(len(text))
            ids += tokenizer.encode(text[start : start + rng.randrange(1, 12)], add_special=False)
        elif rng.random() < 0.3:
            ids.append(rng.choice(sorted(tokenizer._skipped) or [0]))
        else:
            ids.append(rng.randrange(tokenizer.vocab_size))
    return ids[:length]


def some_stops(whole: str, seed: int) -> tuple[str, ...]:
    """Stop strings that are in the text, and some that are not, or overlap."""
    rng, stops = random.Random(seed), []
    for _ in range(rng.randrange(5)):
        start = rng.randrange(len(whole) + 1)
        stop = whole[start : start + rng.randrange(1, 8)]
        stops += [stop, stop[1:], stop + "x", whole[start + 1 : start + 9]][: rng.randrange(1, 5)]
    return tuple(filter(None, stops))


def at_once(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool) -> str:
    """The text of `ids` behind a prompt, decoded in one go."""
    prompt = tokenizer.encode("a", add_special=False)
    return tokenizer.decode([*prompt, *ids], skip_special_tokens=skip_special)[len("a") :]


def marked(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool) -> list[tuple[str, bool]]:
    """The characters that stops may match, and whether each is to be seen: special tokens that are
    skipped stand where they came, behind the last whole character. By brute force.
    """
    characters, num_seen = [], 0
    for number, token in enumerate(ids, 1):
        if skip_special and token in tokenizer._skipped:
            characters += [(letter, False) for letter in tokenizer.id_to_text(token)]
        data = b"".join(tokenizer.pieces(ids[:number], skip_special))
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
        characters += [(letter, True) for letter in text[num_seen:]]
        num_seen = len(text)
    return [*characters, *((c, True) for c in at_once(tokenizer, ids, skip_special)[num_seen:])]


def cut_at(
    characters: Sequence[tuple[str, bool]], stops: Sequence[str], trim: bool
) -> tuple[str, str | None]:
    """What is shown of them, and the stop string that ends it, if one does."""
    found = first_stop("".join(letter for letter, _ in characters), stops)
    end = len(characters) if found is None else found[1] - len(found[0]) * trim
    return "".join(c for c, seen in characters[:end] if seen), found[0] if found else None


def check(arguments: dict[str, Any], body: Callable[..., None], examples: int = 200) -> None:
    """Run `body` over drawn arguments."""
    quiet = settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    quiet(given(**arguments)(body))()


IDS = {"name": NAMES, "seed": st.integers(0, 10**9), "length": st.integers(0, 40)}


def test_text_in_pieces_is_the_text_at_once() -> None:
    seen: Counter[str] = Counter()

    def body(name: str, seed: int, length: int, cuts: list[int], skip: bool, between: bool) -> None:
        tokenizer, ids = TOKENIZERS[name], some_ids(name, seed, length)
        expected = at_once(tokenizer, ids, skip)
        sampling = SamplingParams(
            skip_special_tokens=skip, spaces_between_special_tokens=between, ignore_eos=True
        )
        stream, pieces = Detokenizer(tokenizer, sampling), []
        for chunk in chunked(ids, cuts):
            pieces.append(stream.push(chunk))
            assert expected.startswith("".join(pieces))
        held = stream.finish(stop_token=False)
        assert "".join(pieces) + held == expected
        assert stream.num_tokens_used == len(ids)
        seen["characters split over tokens"] += "" in pieces[:-1]
        seen["no text"] += "\ufffd" in expected
        seen["cut off in a character"] += held != ""
        seen["special tokens skipped"] += skip and not tokenizer._skipped.isdisjoint(ids)
        seen["special tokens shown"] += not skip and not tokenizer._skipped.isdisjoint(ids)
        seen[name] += length > 0

    check({**IDS, "cuts": CUTS, "skip": st.booleans(), "between": st.booleans()}, body, 400)
    assert min(seen.values()) > 5 and len(seen) == 9, seen


def test_text_at_once_is_what_the_tokenizers_library_decodes() -> None:
    """Bytes that are no text are compared for byte-level tokenizers only: with byte fallback the
    library gives up the valid bytes around them too.
    """
    seen: Counter[str] = Counter()

    def body(name: str, seed: int, length: int, skip: bool) -> None:
        tokenizer, ids = TOKENIZERS[name], some_ids(name, seed, length)
        ours = tokenizer.decode(ids, skip_special_tokens=skip)
        if name in ("pieces", "spm") and "\ufffd" in ours:
            return
        assert ours == tokenizer.source.pipeline.decode(ids, skip_special_tokens=skip)
        seen[name] += ours != ""
        seen["no text"] += "\ufffd" in ours

    check({**IDS, "length": st.integers(0, 12), "skip": st.booleans()}, body, 300)
    assert min(seen.values()) > 5 and len(seen) == 5, seen


def test_text_ends_at_the_first_stop_string_wherever_the_cuts_are() -> None:
    seen: Counter[str] = Counter()

    def body(name: str, seed: int, length: int, cuts: list[int], trim: bool, skip: bool) -> None:
        tokenizer, ids = TOKENIZERS[name], some_ids(name, seed, length)
        characters = marked(tokenizer, ids, skip)
        whole = "".join(letter for letter, _ in characters)
        stops = some_stops(whole, seed)
        found, (expected, stop) = first_stop(whole, stops), cut_at(characters, stops, trim)
        sampling = SamplingParams(
            stop=stops, no_stop_trim=not trim, skip_special_tokens=skip, ignore_eos=True
        )
        stream, shown, last = Detokenizer(tokenizer, sampling), "", 0
        for chunk in chunked(ids, cuts):
            last = len(chunk) if stream.stopped is None else last
            shown += stream.push(chunk)
            assert expected.startswith(shown)
        shown += stream.finish(stop_token=False)
        assert shown == expected
        assert stream.stopped == stop
        if found is None:
            assert expected == at_once(tokenizer, ids, skip)
            return
        stop, end, used = *found, stream.num_tokens_used
        start = end - len(stop)
        before = "".join(c for c, _ in marked(tokenizer, ids[: used - 1], skip)).rstrip("\ufffd")
        assert first_stop(before, stops) is None
        overlapping = [
            other
            for other in stops
            for at in range(max(0, start - len(other) + 1), end)
            if other != stop and whole.startswith(other, at)
        ]
        special = ids[used - 1] in tokenizer._skipped
        matched = [seen for _, seen in characters[start:end]]
        seen["stopped"] += 1
        seen["in the first token"] += used == 1
        seen["over several tokens"] += len(before) > start
        seen["inside a push"] += last > 1
        seen["with others that overlap it"] += bool(overlapping)
        seen["from text into a special token"] += special and len(before) > start
        seen["all of it hidden"] += not any(matched)
        seen["a part of it hidden"] += any(matched) and not all(matched)

    check({**IDS, "cuts": CUTS, "trim": st.booleans(), "skip": st.booleans()}, body, 1200)
    assert min(seen.values()) > 5 and len(seen) == 8, seen


def test_a_stop_string_begins_in_text_and_ends_in_a_special_token() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = [*tokenizer.encode("end"), 2, *tokenizer.encode("user")]
    for cuts, skip in itertools.product(([1] * 20, [2] * 10, [20]), (True, False)):
        sampling = SamplingParams(stop=("d<|turn|>u",), skip_special_tokens=skip)
        stream = Detokenizer(tokenizer, sampling)
        assert "".join(stream.push(chunk) for chunk in chunked(ids, cuts)) == "en"
        assert stream.stopped == "d<|turn|>u"


def test_the_token_that_ends_a_text_may_complete_a_stop_string() -> None:
    """Strings come before tokens, as for the end of a turn that is given as a string, too."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = [*tokenizer.encode("end"), 1]
    for stop, keep, text, stopped in (
        ("</s>", False, "end", "</s>"),
        ("d</s>", False, "en", "d</s>"),
        ("d</s>", True, "end", "d</s>"),
        ("d</s>x", False, "end", None),
    ):
        stream = Detokenizer(tokenizer, SamplingParams(stop=(stop,), no_stop_trim=keep))
        assert stream.push(ids) + stream.finish(stop_token=True) == text
        assert (stream.stopped, stream.num_tokens_used) == (stopped, len(ids))


def outputs_of(
    tokenizer: Tokenizer,
    chunks: list[list[int]],
    finish: FinishReason,
    server_wide: int,
    sampling: SamplingParams,
) -> list[Output]:
    submit = Submit(rid="r", prompt_ids=[0], sampling=sampling, stream=True)
    options = ServerOptions(stream_interval=server_wide)
    sequence, outputs = OneSequence(0, submit, tokenizer, NO_METER, options), []
    for number, chunk in enumerate(chunks):
        last = finish if number == len(chunks) - 1 else None
        due = sequence.push(Delta(rid="r", token_ids=chunk, finish=last))
        outputs += [sequence.output()] if due else []
        if sequence.finish is not None:
            break
    return outputs


@pytest.mark.parametrize("own", [None, 1, 4, 9])
def test_an_interval_never_holds_the_first_or_the_last_and_changes_no_text(own: int | None) -> None:
    seen: Counter[str] = Counter()

    def body(name: str, seed: int, length: int, cuts: list[int], server_wide: int) -> None:
        tokenizer, ids = TOKENIZERS[name], some_ids(name, seed, length)
        characters = marked(tokenizer, ids, True)
        whole = "".join(letter for letter, _ in characters)
        stops = some_stops(whole, seed) if seed % 2 else ()
        sampling = SamplingParams(stop=stops, ignore_eos=True, stream_interval=own)
        chunks = chunked(ids, cuts)
        by_length = FinishReason(type="length", length=length)
        outputs = outputs_of(tokenizer, chunks, by_length, server_wide, sampling)
        text, found = cut_at(characters, stops, True)
        *early, last = outputs
        assert last.finish is not None and last.text == text
        assert last.finish.type == ("length" if found is None else "stop")
        assert "".join(output.delta for output in outputs) == text
        assert [i for output in outputs for i in output.new_ids] == last.output_ids
        interval = own or server_wide
        if early:
            assert early[0].new_ids == chunks[0]
            assert all(len(output.new_ids) >= interval for output in early[1:])
        for one, other in itertools.pairwise(outputs):
            assert one.finish is None and other.text == one.text + other.delta
        used = 1 + next(
            n for n in range(len(chunks)) if sum(map(len, chunks[: n + 1])) >= len(last.output_ids)
        )
        seen["tokens were held back"] += len(outputs) < used
        seen["the last were fewer than the interval"] += 0 < len(last.new_ids) < interval
        seen["several came"] += len(early) > 1

    drawn = {"server_wide": st.sampled_from([1, 3, 8])}
    check({**IDS, "length": st.integers(1, 40), "cuts": CUTS, **drawn}, body, 150)
    if own == 1:
        del seen["tokens were held back"], seen["the last were fewer than the interval"]
    assert min(seen.values()) > 2, seen


def test_an_end_token_is_trimmed_after_any_cut() -> None:
    seen: Counter[str] = Counter()

    def body(name: str, seed: int, length: int, cuts: list[int], keep: bool, skip: bool) -> None:
        tokenizer = TOKENIZERS[name]
        end = tokenizer.encode("t", add_special=False)[-1]  # a token with text, given as a stop id
        ids = [*some_ids(name, seed, length), end]
        sampling = SamplingParams(
            stop_token_ids=(end,), no_stop_trim=keep, skip_special_tokens=skip
        )
        stream = Detokenizer(tokenizer, sampling)
        shown = "".join(stream.push(chunk) for chunk in chunked(ids, cuts))
        shown += stream.finish(stop_token=True)
        expected = at_once(tokenizer, ids if keep else ids[:-1], skip)
        assert shown == expected
        assert stream.num_tokens_used == len(ids)
        seen["kept" if keep else "trimmed"] += 1
        seen["came before, too"] += end in ids[:-1]

    check({**IDS, "cuts": CUTS, "keep": st.booleans(), "skip": st.booleans()}, body)
    assert min(seen.values()) > 5 and len(seen) == 3, seen
