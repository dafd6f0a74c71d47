"""Stop regexes: found whatever the cuts, text that may begin a match held back, none too slow."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fake_engine import ByteTokenizer, continuation
from fake_server_engine import Api
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer_detokenizer import SMOLLM2, TOKENIZERS, chunked, first_stop

from jserve.__main__ import main
from jserve.engine.engine import Engine, sampling_from_dict
from jserve.errors import RequestError
from jserve.tokenizer import stop_regex
from jserve.tokenizer.detokenizer import Detokenizer
from jserve.tokenizer.sources import byte_source
from jserve.tokenizer.stop_regex import MAX_HELD, RegexFilter, check_stop_regexes, compiled
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import Abort, GenerateRequest, Output, SamplingParams

BYTES = Tokenizer(byte_source(300, eos=[299]))
PATTERNS = (
    *("ab", "a+b", "a{2,3}", "a.*b", "(?s)a.*b", r"\bab", r"ab\b", r"^b", r"(?m)^b", r"b$"),
    *(r"\A[ab]b", "a(?=b)", "a(?!b)", "(?<=b)a", "(?<!b)a", "(?i)AB", "a|ba|bab", "[^a]b", "a*?b"),
    *(r"é\W", r"\n\n+", r"\s{2}", "🎉+b", "(a|b)(a|b)\\1", r"(?:a|b)+\n", r"\w\W\w", "b{1}"),
)
TEXT = st.text("ab\n 🎉é", max_size=24)


def filtered(
    pieces: Sequence[str], patterns: Sequence[str], stops: Sequence[str] = (), trim: bool = True
) -> tuple[list[str], str | None, int]:
    """What each piece let through and the end did, what stopped, and after how many pieces."""
    watch, shown = RegexFilter(patterns, stops, trim), []
    for i, piece in enumerate(pieces):
        shown.append(watch.feed(piece))
        if watch.stopped is not None:
            return shown, watch.stopped, i + 1
    return [*shown, watch.finish("")], watch.stopped, len(pieces)


def searched(
    pieces: Sequence[str], patterns: Sequence[str], stops: Sequence[str], trim: bool
) -> tuple[str, str | None, int]:
    """The same by Python's `re`, over all the text after each piece."""
    text = ""
    for i, piece in enumerate(pieces):
        text += piece
        if found := first_stop(text, stops):
            return text[: found[1] - len(found[0]) * trim], found[0], i + 1
        for pattern in patterns:
            if piece and (match := re.search(pattern, text)):
                return text[: match.start() if trim else match.end()], pattern, i + 1
    return text, None, len(pieces)


@settings(max_examples=600, deadline=None)
@given(
    pieces=st.lists(st.text("ab\n 🎉é", max_size=5), max_size=12),
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3),
    stops=st.lists(st.text("ab\n é", min_size=1, max_size=3), max_size=2),
    trim=st.booleans(),
)
def test_it_finds_what_pythons_re_finds_in_all_the_text(
    pieces: list[str], patterns: list[str], stops: list[str], trim: bool
) -> None:
    shown, stopped, used = filtered(pieces, patterns, stops, trim)
    assert ("".join(shown), stopped, used) == searched(pieces, patterns, stops, trim)


def test_every_pattern_of_that_property_has_matched() -> None:
    """And was split where it has two characters: it began in one piece and ended in another."""
    num_split = 0
    for pattern in PATTERNS:
        for text in ("ab aab\n\nb é bab  ba🎉🎉b\n", "bb", "ba\nb{1}"):
            expected = searched(list(text), [pattern], (), True)
            if expected[1] is None:
                continue
            shown, stopped, used = filtered(list(text), [pattern])
            assert ("".join(shown), stopped, used) == expected
            num_split += used - len(expected[0]) > 1
            break
        else:
            raise AssertionError(f"{pattern} matches no text")
    assert num_split > 10


@settings(max_examples=150, deadline=None)
@given(
    text=TEXT,
    pattern=st.sampled_from(PATTERNS),
    sizes=st.lists(st.integers(1, 7), max_size=30),
    name=st.sampled_from(sorted(TOKENIZERS)),
    trim=st.booleans(),
)
def test_the_cut_into_pushes_changes_nothing(
    text: str, pattern: str, sizes: list[int], name: str, trim: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special=False)
    results = set()
    for chunks in ([ids], [[token] for token in ids], chunked(ids, sizes)):
        sampling = SamplingParams(stop_regex=(pattern,), no_stop_trim=not trim)
        stream, shown = Detokenizer(tokenizer, sampling), ""
        for chunk in chunks:
            shown += stream.push(chunk)
        shown += stream.finish(stop_token=False)
        results.add((shown, stream.stopped, stream.num_tokens_used))
    assert len(results) == 1


def test_text_that_may_begin_a_match_is_held_back_and_no_more() -> None:
    pieces = ["so 1", "2", "x 1", "23", " never"]
    assert filtered(pieces, [r"\d{3}\."]) == (["so ", "", "12x ", "", "123 never", ""], None, 5)
    shown = filtered(["a User", ":", " b Us", "er", "x", " Us"], [r"User[:;]\S"])[0]
    assert shown == ["a ", "", "User: b ", "", "Userx", " ", "Us"]


def test_an_emoji_split_over_tokens_completes_a_match() -> None:
    stream = Detokenizer(BYTES, SamplingParams(stop_regex=("🎉+!",)))
    shown = [stream.push([byte]) for byte in "ok 🎉🎉!".encode()]
    assert "".join(shown) == "ok "
    assert (stream.stopped, stream.num_tokens_used) == ("🎉+!", 12)


def test_a_match_in_the_first_token_leaves_no_text() -> None:
    (token,) = SMOLLM2.encode(" the")
    stream = Detokenizer(SMOLLM2, SamplingParams(stop_regex=(r"\w+",)))
    assert stream.push([token, token]) == " "
    assert (stream.stopped, stream.num_tokens_used) == (r"\w+", 1)


def test_special_tokens_are_searched_though_they_may_not_be_shown() -> None:
    ids = [*SMOLLM2.encode("hi"), 1, *SMOLLM2.encode("user")]
    for pattern, keep, skip, text in (
        (r"<\|im_\w+\|>", False, True, "hi"),
        (r"<\|im_\w+\|>", False, False, "hi"),
        (r"i<\|im_\w+\|>us", True, True, "hius"),
        (r"i<\|im_\w+\|>us", True, False, "hi<|im_start|>us"),
        (r"i<\|im_\w+\|>us", False, True, "h"),
    ):
        sampling = SamplingParams(
            stop_regex=(pattern,), skip_special_tokens=skip, no_stop_trim=keep
        )
        stream = Detokenizer(SMOLLM2, sampling)
        assert stream.push(ids) + stream.finish(stop_token=False) == text
        assert stream.stopped == pattern


def test_an_unbounded_match_holds_back_a_bounded_text() -> None:
    watch = RegexFilter((r"(?s)<a>.*</a>",), (), trim=True)
    shown = [watch.feed("x<a>"), *(watch.feed("y" * 100) for _ in range(42))]
    held = 3 + 41 * 100 - MAX_HELD
    assert [len(text) for text in shown] == [1, *[0] * 40, held, 4203 - held]
    assert watch.feed("</a>") == "</a>" and watch.stopped is None  # it began too long ago
    assert watch.feed("z<a>" + "y" * (MAX_HELD - 7)) == "z"
    assert watch.feed("</a>") == "" and watch.stopped is not None


def test_a_pattern_beyond_the_limits_is_refused_with_reason_and_position() -> None:
    for pattern, reason in (
        ("ab(", "position 2"),
        ("a)", "position 1"),
        ("[z-a]", "position 1"),
        ("*a", "nothing to repeat at position 0"),
        ("(a)\\2", "position 4"),
        ("(?R)", "position 1"),
        ("a{3,1}", "position"),
        ("(?x) a", "flag x"),
        ("a(?#b)c", "comments"),
        ("", "empty"),
        ("a*", "empty"),
        ("a{99999999999999}", "repetition number is too large"),
        ("x" * 257, "256 bytes"),
        ("é" * 129, "256 bytes"),
        ("(((((a+)+)+)+)+)b", "5 repeats"),
        ("\ud800" * 90, "256 bytes"),
    ):
        with pytest.raises(RequestError, match=reason) as caught:
            check_stop_regexes((pattern,))
        assert caught.value.param == "stop_regex"
    with pytest.raises(RequestError, match="at most 32 patterns, got 33"):
        check_stop_regexes(["a"] * 33)
    check_stop_regexes(["a" * 256] * 32)


def test_a_brace_that_python_reads_as_itself_is_itself() -> None:
    for pattern, text in ((r"\\end{d}", "\\end{d}"), ("a{e}", "a{e}"), ("[{]i<=1}", "{i<=1}")):
        assert re.search(pattern, text) and compiled(pattern).whole.fullmatch(text), pattern
        assert not compiled(pattern).whole.search(text.replace("{", "").replace("}", ""))


HARD = (
    *("(a+)+b", "(?:a|aa)+b", "(a*)*b", r"(.*)*x\1\1", "(?:a{1,30}){1,30}b", "a+a+a+a+a+b"),
    *("(?i)(ß|ss|a)+b", "(?>(a+)+$)q", "((a?){20}){20}c", r"(?s).*\w.*\w.*\w.*y"),
)


def test_no_pattern_takes_more_than_50_ms_a_token() -> None:
    """Of processor time. It is found, or not, in a text made to be slow, or refused."""
    refused = 0
    for pattern in HARD:
        slowest = total = 0.0
        watch = RegexFilter((pattern,) * 32, (), trim=True)
        for piece in ["a" * 40 + "!", *["a" * 7] * 300, "!"]:
            started = time.thread_time()
            try:
                watch.feed(piece)
            except RequestError:
                refused += 1
                break
            finally:
                spent = time.thread_time() - started
                slowest, total = max(slowest, spent), total + spent
        assert slowest < 0.05, pattern
        assert total < 0.05 + 303 * (0.00025 + 32 * 0.00005), pattern
    assert refused > 3, "the texts were not slow"


def test_a_slow_pattern_is_refused_by_name_when_its_time_is_up() -> None:
    watch = RegexFilter(("x", "(a+)+b"), (), trim=True)
    with pytest.raises(RequestError, match=r"\(a\+\)\+b.*takes too long") as caught:
        watch.feed("a" * 200 + "!")
    assert caught.value.param == "stop_regex"


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_only_the_time_of_its_own_searches_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of compiling, nor that of other threads, which the library counts too."""
    given_up = []

    class Pattern:
        def search(self, *_: Any, **how: Any) -> None:
            given_up.append(how["timeout"])
            busy(stop_regex._BURST / 20)
            if len(given_up) < 5 or others < 5:
                raise TimeoutError

    def compiled(_: str) -> stop_regex.StopRegex:
        busy(2 * stop_regex._BURST)
        pattern: Any = Pattern()
        return stop_regex.StopRegex(pattern, pattern)

    monkeypatch.setattr(stop_regex, "compiled", compiled)
    others = 5
    watch = RegexFilter(("a", "b"), (), trim=True)
    assert watch.feed("text") == "text" and len(given_up) == 8  # 4 of them in vain
    assert given_up == sorted(given_up, reverse=True)
    others = 0
    with pytest.raises(RequestError, match="'a' takes too long"):
        watch.feed("text")
    assert 15 < len(given_up) < 40


def test_compiling_is_bounded_too() -> None:
    """The patterns that take the `regex` module longest, of those that are let through."""
    for repeat in ("{2}", "{3,}?", "{1,9}", "+"):
        for opening in ("(?>(?:", "(?=(?<=", "(((", "(?i:("):
            pattern = opening * 4 + "ab" + f"{')' * opening.count('(')}{repeat}" * 4
            started = time.thread_time()
            with contextlib.suppress(RequestError):
                compiled(pattern)
            assert time.thread_time() - started < 0.05, pattern


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    flags: dict[str, Any] = {"inline": True, "tokenizer": ByteTokenizer()}
    with Engine(model_path="fake", builder="fake_engine:build", **flags) as engine:
        yield engine


def text_of(prompt: str, count: int) -> str:
    return bytes(continuation(list(prompt.encode()), count)).decode()


async def collect(engine: Engine, request: GenerateRequest) -> list[Output]:
    async with contextlib.aclosing(engine.generate_stream(request)) as outputs:
        return [output async for output in outputs]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("interval", [None, 3, 7])
def test_a_regex_in_the_middle_ends_the_request_in_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, stream: bool, interval: int | None
) -> None:
    sent: list[Any] = []
    send = engine._client.send
    monkeypatch.setattr(engine._client, "send", lambda m: (sent.append(m), send(m)))
    whole = text_of("hello", 300)
    pattern = f"{whole[10]}{whole[11]}{whole[12]}[a-z]"
    cut = re.search(pattern, whole).start()  # type: ignore[union-attr]
    sampling = SamplingParams(
        temperature=0.0, max_new_tokens=300, stop_regex=(pattern,), stream_interval=interval
    )
    request = GenerateRequest(text="hello", sampling=sampling, stream=stream)
    outputs = asyncio.run(collect(engine, request))
    last = outputs[-1]
    assert last.text == whole[:cut] == "".join(output.delta for output in outputs)
    assert [i for o in outputs for i in o.new_ids] == last.output_ids
    assert last.completion_tokens == len(last.output_ids) == cut + 4
    assert last.finish is not None
    assert (last.finish.type, last.finish.matched) == ("stop", pattern)
    assert [m.stopped for m in sent if isinstance(m, Abort)] == [True]
    for output in outputs:
        assert whole.startswith(output.text)


def test_the_engine_takes_one_or_several_and_keeps_the_match_on_request(engine: Engine) -> None:
    whole = text_of("hello", 40)
    pattern = whole[5:7] + "."
    cut = whole.index(whole[5:7])
    params = {"max_new_tokens": 40, "stop_regex": pattern}
    body = engine.generate("hello", params)
    assert body["text"] == whole[:cut]
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
    params = {"max_new_tokens": 40, "stop_regex": ["0+", pattern], "no_stop_trim": True}
    assert engine.generate("hello", params)["text"] == whole[: cut + 3]


def test_a_stop_string_wins_over_a_regex_at_the_same_token_and_a_regex_over_length(
    engine: Engine,
) -> None:
    end = text_of("hello", 8)[5:]
    params = {"stop": end, "stop_regex": [f"{end[1:]}$", end], "max_new_tokens": 8}
    for removed, matched in ((None, end), ("stop", f"{end[1:]}$"), ("stop_regex", None)):
        params.pop(removed, None)
        reason = engine.generate("hello", params)["meta_info"]["finish_reason"]
        expected = {"type": "length", "length": 8}
        assert reason == ({"type": "stop", "matched": matched} if matched else expected)


def test_a_pattern_that_turns_out_slow_ends_its_request_and_no_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_regex, "_BURST", 1e-9)
    slow = {"max_new_tokens": 300, "stop_regex": ["(?:[a-z]+)+0"]}

    async def both() -> list[Any]:
        work = [engine.async_generate("hello", params) for params in (slow, {"max_new_tokens": 60})]
        return await asyncio.gather(*work, return_exceptions=True)

    refused, body = asyncio.run(both())
    assert isinstance(refused, RequestError) and refused.param == "stop_regex"
    assert body["text"] == text_of("hello", 60)
    deadline = time.monotonic() + 2
    while not engine.flush_cache():
        assert time.monotonic() < deadline, "the request is still running"


def test_it_is_a_parameter_of_every_surface(capsys: pytest.CaptureFixture[str]) -> None:
    assert sampling_from_dict({"stop_regex": "a+"}).stop_regex == ("a+",)
    assert sampling_from_dict({"stop_regex": ["a+", "b"]}).stop_regex == ("a+", "b")
    assert sampling_from_dict({"stop_regex": None}).stop_regex == ()
    api = Api()
    hello = [{"role": "user", "content": "hi"}]
    for given_, taken in (("a+", ("a+",)), (["a+", "b"], ("a+", "b")), (None, ())):
        api.ok("/v1/chat/completions", messages=hello, stop_regex=given_)
        api.ok("/v1/completions", prompt="a", stop_regex=given_)
        api.ok("/generate", text="a", sampling_params={"stop_regex": given_})
        assert [r.sampling.stop_regex for r in api.engine.requests[-3:]] == [taken] * 3
    for path, body in (
        ("/v1/chat/completions", {"messages": hello, "stop_regex": "a("}),
        ("/v1/completions", {"prompt": "a", "stop_regex": ["b", "a("]}),
        ("/generate", {"text": "a", "sampling_params": {"stop_regex": "a("}}),
    ):
        reply = api.post(path, **body)
        assert reply.status_code == 400
        assert "stop_regex" in reply.text and "at position 1" in reply.text
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "--stop-regex" in capsys.readouterr().out


def test_as_many_patterns_as_are_allowed_have_time_enough() -> None:
    """Three times as much as they take, so that a slow machine refuses nobody."""
    watch = RegexFilter([rf"\n{i}+\.\s" for i in range(32)], (), trim=True)
    words = ["The ", "tide ", "is ", "10 \n", "and ", "\n7", "ebb "] * 100
    started = time.thread_time()
    shown = "".join(map(watch.feed, words)) + watch.finish("")
    spent = time.thread_time() - started
    assert shown == "".join(words)
    assert 3 * spent < len(words) * watch._share, f"{spent / len(words) * 1e6:.0f} µs a word"
