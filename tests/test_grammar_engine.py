"""Grammars through the whole engine, over a scripted runner that heeds masks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import jsonschema
import msgspec
import pytest
from fake_engine import continuation
from grammar_engine import END, EndingTokenizer

from jserve.engine.engine import Engine
from jserve.engine.grammar_queue import GrammarQueue
from jserve.errors import ConfigError, RequestError
from jserve.grammar.jump import JumpForward
from jserve.grammar.templates import Templates
from jserve.types import (
    Abort,
    CompiledSpec,
    Control,
    ControlReply,
    Deltas,
    GenerateRequest,
    GrammarSpec,
    SamplingParams,
    Submit,
)

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def start(builder: str = "build", **flags: Any) -> Engine:
    flags = {"grammar_backend": "llguidance", **flags}
    return Engine(
        model_path="fake",
        inline=True,
        builder=f"grammar_engine:{builder}",
        tokenizer=EndingTokenizer(),  # type: ignore[arg-type]
        **flags,
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with start(enable_metrics=True) as engine:
        yield engine


def ask(engine: Engine, prompt: str = "hello", **sampling: Any) -> dict[str, Any]:
    return engine.generate(prompt, {"temperature": 0, "max_new_tokens": 60} | sampling)


def kind(body: dict[str, Any]) -> str:
    return body["meta_info"]["finish_reason"]["type"]


@pytest.mark.parametrize("form", [SCHEMA, json.dumps(SCHEMA)])
def test_an_answer_follows_a_json_schema_given_as_text_or_object(engine: Engine, form: Any) -> None:
    body = ask(engine, json_schema=form)
    jsonschema.validate(json.loads(body["text"]), SCHEMA)
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": END}


def test_an_answer_matches_a_regex_as_a_whole(engine: Engine) -> None:
    body = ask(engine, regex=r"[A-F]{3}-\d{2}")
    assert re.fullmatch(r"[A-F]{3}-\d{2}", body["text"]) and kind(body) == "stop"


def test_an_answer_is_one_of_the_choices(engine: Engine) -> None:
    body = ask(engine, choices=["(red)", "a+b", "blue"])
    assert body["text"] in ("(red)", "a+b", "blue") and kind(body) == "stop"


def test_an_answer_follows_a_grammar(engine: Engine) -> None:
    body = ask(engine, ebnf='root ::= "x" [0-9] "=" [0-9] ";"')
    assert re.fullmatch(r"x\d=\d;", body["text"]) and kind(body) == "stop"


def test_an_answer_is_a_json_object(engine: Engine) -> None:
    body = ask(engine, json_object=True)
    assert kind(body) == "length" or json.loads(body["text"]) is not None
    assert body["text"].startswith("{")


def test_text_around_a_structural_tag_is_free(engine: Engine) -> None:
    tag = {
        "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
        "triggers": ["<f>"],
    }
    body = ask(engine, structural_tag=tag, max_new_tokens=20)
    assert kind(body) == "length" and "<f>" not in body["text"]


def test_an_answer_cut_by_length_is_a_prefix_and_says_so(engine: Engine) -> None:
    body = ask(engine, regex="(ab){20}", max_new_tokens=7)
    assert body["text"] == "abababa" and kind(body) == "length"


def test_free_requests_beside_bound_ones_answer_as_alone(engine: Engine) -> None:
    prompts = [f"prompt {i}" for i in range(12)]
    params = [
        {"temperature": 0, "max_new_tokens": 30} | ({"regex": rf"{i}:[a-z]{{9}}"} if i % 2 else {})
        for i in range(12)
    ]
    before = engine.get_server_info().get("grammar_rows_masked_total", 0)
    for i, body in enumerate(engine.generate(prompts, params)):
        if i % 2:
            assert re.fullmatch(rf"{i}:[a-z]{{9}}", body["text"]), body
        else:
            assert body["output_ids"] == continuation(list(prompts[i].encode()), 30)
    assert engine.get_server_info()["grammar_rows_masked_total"] >= before + 6 * 11


def test_every_one_of_n_sequences_follows_its_grammar_with_logprobs(engine: Engine) -> None:
    params = {"n": 3, "regex": "[ab]{4}", "max_new_tokens": 9, "temperature": 1.0}
    bodies = engine.generate("a prompt", params, return_logprob=True)
    assert len(bodies) == 3
    for body in bodies:
        assert re.fullmatch("[ab]{4}", body["text"])
        assert len(body["meta_info"]["output_token_logprobs"]) == 5  # the end token too


def test_a_stop_string_ends_an_answer_inside_its_grammar(engine: Engine) -> None:
    body = ask(engine, regex="(ab){9}", stop=["bab"])
    assert body["text"] == "a" and body["meta_info"]["finish_reason"]["matched"] == "bab"


def test_min_new_tokens_keep_an_answer_from_ending_where_it_could(engine: Engine) -> None:
    assert len(ask(engine, regex="z*", min_new_tokens=5, max_new_tokens=9)["text"]) >= 5
    body = ask(engine, regex="zz", min_new_tokens=5)
    finish = body["meta_info"]["finish_reason"]
    assert body["text"] == "zz" and finish["type"] == "abort"
    assert finish["message"].startswith("The answer is incomplete: the grammar allows no more")


def test_an_answer_that_ignores_the_end_token_ends_with_its_grammar(engine: Engine) -> None:
    body = ask(engine, regex="zz", ignore_eos=True)
    assert body["text"] == "zz" and kind(body) == "stop"


def test_bound_answers_stream(engine: Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 60, "json_schema": SCHEMA}
    bodies = list(engine.generate("stream", params, stream=True))
    assert len(bodies) > 5
    jsonschema.validate(json.loads(bodies[-1]["text"]), SCHEMA)


GAPS = (0.003, 0.002, 0.005, 0.001, 0.008, 0.004, 0.013, 0.006)  # who is retracted is timing


def staggered(
    engine: Engine, prompts: list[str], params: list[Any], gap: float = GAPS[0]
) -> list[dict[str, Any]]:
    """Answers to requests that come one by one, `gap` seconds apart, while the others run."""

    async def one(i: int) -> dict[str, Any]:
        await asyncio.sleep(gap * i)
        return await engine.async_generate(prompts[i], params[i])

    async def all_of_them() -> list[dict[str, Any]]:
        return await asyncio.gather(*map(one, range(len(prompts))))

    # so that no compilation comes between them
    engine.generate(["x"] * len(params), [fields | {"max_new_tokens": 1} for fields in params])
    return asyncio.run(all_of_them())


@pytest.mark.parametrize("builder", ["build_tight", "build_failing"])
def test_retraction_and_a_failed_step_lose_nothing_of_a_grammar(builder: str) -> None:
    with start(builder) as engine:
        count = 8
        prompts = [f"{i} " + "long prompt " * 2 for i in range(count)]
        params = [
            {"regex": rf"{i}:[a-z]{{40}}", "temperature": 0, "max_new_tokens": 60}
            for i in range(count)
        ]
        retracted = 0
        for gap in GAPS:
            bodies = staggered(engine, prompts, params, gap)
            for i, body in enumerate(bodies):
                assert re.fullmatch(rf"{i}:[a-z]{{40}}", body["text"]), body["text"]
            retracted += sum(body["meta_info"]["num_retractions"] for body in bodies)
            if retracted or builder == "build_failing":
                break
        assert retracted > 0 or builder == "build_failing"
        info = engine.get_server_info()
        assert info["cache_active_references"] == 0


LITERALS = r"name: [A-F]{2}, place of birth: [a-z]{3}, year: \d{4} \(verified\)"


@pytest.mark.parametrize("builder", ["build_jumping", "build_jumping_tight"])
def test_forced_text_is_appended_in_one_step_and_changes_no_answer(
    engine: Engine, builder: str
) -> None:
    prompts = [f"{i} " + "long prompt " * 2 for i in range(6)]
    params = [
        {"temperature": 0, "max_new_tokens": 90, "regex": f"{i}: {LITERALS}"} for i in range(6)
    ]
    plain = engine.generate(prompts, params)
    with start(builder) as jumping:
        bodies = staggered(jumping, prompts, params)
        assert [body["text"] for body in bodies] == [body["text"] for body in plain]
        info = jumping.get_server_info()
        assert info["num_jump_forward_tokens_total"] > 100
        assert info["cache_active_references"] == 0
        if builder == "build_jumping_tight":
            assert info["evicted_tokens_total"] > 0


def test_limits_stops_and_logprobs_hold_in_forced_text() -> None:
    with start("build_jumping") as engine:
        regex = "the text is forced and goes on"
        body = ask(engine, regex=regex, max_new_tokens=9)
        assert body["text"] == regex[:9] and kind(body) == "length"
        assert ask(engine, regex=regex, stop=["forced"])["text"] == "the text is "
        body = ask(engine, regex=regex, stop_token_ids=[ord("x")], no_stop_trim=True)
        assert body["text"] == "the tex" and kind(body) == "stop"
        jumped = engine.get_server_info()["num_jump_forward_tokens_total"]
        params = {"temperature": 0, "max_new_tokens": 60, "regex": regex}
        body = engine.generate("hello", params, return_logprob=True)
        assert len(body["meta_info"]["output_token_logprobs"]) == len(regex) + 1
        assert engine.get_server_info()["num_jump_forward_tokens_total"] == jumped > 0


class Words:
    """Tokens of several letters: ab, abc, c, d and single bytes."""

    tokens = (b"ab", b"abc", b"c", b"d", b"cd")

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        ids, data = [], text.encode()
        while data:
            at = max(
                (i for i, one in enumerate(self.tokens) if data.startswith(one)),
                key=lambda i: len(self.tokens[i]),
            )
            ids.append(at)
            data = data[len(self.tokens[at]) :]
        return ids

    def pieces(self, ids: Any, skip_special_tokens: bool) -> list[bytes]:
        return [self.tokens[i] for i in ids]


@pytest.mark.parametrize(
    ("output", "forced", "run"),
    [
        ([3], b"abcdabcd", [1, 3, 1, 3]),  # tokenized as behind what was there
        ([0], b"cdabcd", [4, 1, 3]),  # ab + c would have been one token: the run stands alone
        ([], b"abcab", [1, 0]),
        ([3], b"ab\xc3", []),  # no text
    ],
)
def test_a_forced_run_is_tokenized_behind_what_was_generated(
    output: list[int], forced: bytes, run: list[int]
) -> None:
    jump = JumpForward(Words(), lambda request, tokens: None)
    assert jump._run(output, forced) == run


# ---- what cannot be compiled


def test_a_grammar_that_cannot_be_compiled_is_refused_with_its_place(engine: Engine) -> None:
    with pytest.raises(RequestError, match="Failed to compile regex grammar: .*position 2") as info:
        ask(engine, regex="ab[c")
    assert info.value.param == "regex"
    with pytest.raises(RequestError, match="Failed to compile json_schema grammar"):
        ask(engine, json_schema={"type": "strange"})


def test_a_schema_that_allows_nothing_is_refused_and_not_left_out(engine: Engine) -> None:
    for schema in (False, "false", {"not": {}}):
        with pytest.raises(RequestError, match="Failed to compile json_schema grammar"):
            ask(engine, json_schema=schema)
    with pytest.raises(RequestError, match="structural_tag grammar"):
        ask(engine, structural_tag={})


@pytest.mark.parametrize(
    ("field", "value"), [("choices", ["a"]), ("json_object", True), ("regex", "a"), ("ebnf", "a")]
)
def test_a_refusal_names_the_field_that_was_sent(field: str, value: Any) -> None:
    with start(grammar_backend="none") as engine:
        with pytest.raises(RequestError, match=f"Failed to compile {field} grammar") as caught:
            ask(engine, **{field: value})
        assert caught.value.param == field
        with pytest.raises(RequestError, match="syntax_field is not a sampling parameter"):
            ask(engine, syntax_field="regex")


@pytest.mark.parametrize("value", [9007199254740993, 2**64, -(2**63) - 1, [[1, 10**22 + 1]]])
def test_a_fixed_number_that_would_be_rounded_is_refused(engine: Engine, value: Any) -> None:
    for schema in ({"const": value}, {"enum": ["a", value]}):
        with pytest.raises(RequestError, match="more than a double holds exactly"):
            ask(engine, json_schema=schema)
    assert json.loads(ask(engine, json_schema={"const": 2**53})["text"]) == 2**53


def test_two_grammars_are_refused(engine: Engine) -> None:
    sampling = SamplingParams(regex="a", ebnf="root ::= b")
    with pytest.raises(RequestError, match="at most one"):
        asyncio.run(first(engine, GenerateRequest(text="a", sampling=sampling)))


def test_a_server_without_a_backend_refuses_grammars_and_serves_the_rest() -> None:
    with start(grammar_backend="none") as engine:
        with pytest.raises(RequestError, match="--grammar-backend is none"):
            ask(engine, regex="a")
        assert ask(engine, max_new_tokens=3)["output_ids"] == continuation(list(b"hello"), 3)


def test_an_unknown_backend_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="--grammar-backend must be one of"):
        start(grammar_backend="outlines")


async def first(engine: Engine, request: GenerateRequest) -> Any:
    async with contextlib.aclosing(engine.generate_stream(request)) as outputs:
        async for output in outputs:
            if output.finish is not None:
                return output
    return None


def test_grammars_are_counted(engine: Engine) -> None:
    for _ in range(2):
        ask(engine, regex="counted[0-9]")
    text = engine.metrics.render().decode()

    def value(name: str) -> float:
        found = re.search(rf"jserve:{name}(?:\{{[^}}]*\}})? ([\d.e+]+)", text)
        assert found, name
        return float(found[1])

    assert value("num_grammar_total") >= 2 and value("num_grammar_cache_hit_total") >= 1
    assert value("grammar_compilation_time_seconds_count") >= 1
    assert value("num_grammar_queue_reqs") == 0
    assert value("grammar_rows_masked_total") > 0


def test_flushing_the_cache_forgets_compiled_grammars(engine: Engine) -> None:
    for _ in range(2):
        ask(engine, regex="flushed")
        assert engine.flush_cache(timeout=10.0)
    compiler = engine.grammars._compiler
    assert compiler is not None
    hits = compiler.counts.cache_hits
    ask(engine, regex="flushed")
    assert compiler.counts.cache_hits == hits
    ask(engine, regex="flushed")
    assert compiler.counts.cache_hits == hits + 1


# ---- what waits in the engine


class Slow:
    """Templates whose loads end by hand, and whether the engine is in a pause."""

    paused = False
    seconds = 30.0

    def __init__(self) -> None:
        self.loading: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def share(self, compiled: CompiledSpec) -> tuple[CompiledSpec, concurrent.futures.Future[Any]]:
        return compiled, self.loading


class Sent:
    def __init__(self) -> None:
        self.items: list[Any] = []

    def send(self, message: Deltas | ControlReply) -> None:
        self.items += message.items if isinstance(message, Deltas) else [message]


@pytest.fixture
def rig() -> tuple[GrammarQueue, Slow, Sent]:
    slow = Slow()
    return GrammarQueue(cast(Templates, slow), lambda: slow.paused), slow, Sent()


BOUND = Submit(
    rid="bound",
    prompt_ids=[1],
    sampling=SamplingParams(),
    waited=1.5,
    grammar=CompiledSpec(spec=GrammarSpec(kind="regex", text="a"), payload=b"a"),
)
FREE = Submit(rid="free", prompt_ids=[1], sampling=SamplingParams())


def test_a_request_comes_through_once_its_grammar_is_loaded_and_others_at_once(rig: Any) -> None:
    queue, slow, sent = rig
    assert queue.sift([BOUND, FREE], sent) == [FREE]
    assert queue.sift([], sent) == [] and list(queue.waiting) == ["bound"]
    slow.loading.set_result("template")
    time.sleep(0.01)
    (passed,) = queue.sift([], sent)
    assert isinstance(passed, Submit) and 1.51 <= passed.waited < 2.5  # with the time here
    assert msgspec.structs.replace(passed, waited=1.5) == BOUND
    assert not queue.waiting and not sent.items


def test_a_grammar_that_cannot_be_loaded_ends_its_request_alone(rig: Any) -> None:
    queue, slow, sent = rig
    slow.loading.set_exception(ValueError("broken"))
    assert queue.sift([BOUND, FREE], sent) == [FREE]
    (delta,) = sent.items
    assert delta.rid == "bound" and delta.finish.status_code == 500


def test_a_grammar_that_is_not_loaded_in_time_ends_its_request_alone(rig: Any) -> None:
    queue, slow, sent = rig
    slow.seconds = 0.05
    assert queue.sift([BOUND, FREE], sent) == [FREE] and not sent.items
    time.sleep(0.1)
    assert queue.sift([], sent) == [] and not queue.waiting
    (delta,) = sent.items
    assert (delta.rid, delta.finish.status_code) == ("bound", 503)
    assert "longer than 0.05 s (--grammar-compile-timeout)" in delta.finish.message
    slow.loading.set_result("template")  # for the next one
    (passed,) = queue.sift([BOUND], sent)
    assert passed.rid == "bound"


class Hanging:
    """A backend whose loads of ebnf wait for the test, whose others are at once."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()

    def load(self, payload: bytes) -> str:
        if payload == b"ebnf":
            self.begun.set()
            assert self.gate.wait(60)
        return f"template of {payload.decode()}"


def test_a_kind_whose_library_is_being_loaded_delays_no_other() -> None:
    def bound(kind: str) -> CompiledSpec:
        return CompiledSpec(spec=GrammarSpec(kind=kind, text="a"), payload=kind.encode())

    backend = Hanging()
    templates = Templates(cast(Any, lambda: backend))
    first = templates.load(bound("ebnf"))
    assert backend.begun.wait(60)
    for kind in ("json", "regex"):
        assert cast(Any, templates.load(bound(kind)).result(60)) == f"template of {kind}"
    assert not first.done()
    backend.gate.set()
    assert cast(Any, first.result(60)) == "template of ebnf"
    templates.close()


@pytest.mark.parametrize(
    "message",
    [
        Abort(rid="bound"),
        Abort(rid="bo", exact=False),
        Abort(abort_all=True),
        Control(id="1", op="pause_generation"),
        Control(id="1", op="pause_generation", args={"mode": "abort"}),
    ],
)
def test_what_aborts_a_request_ends_it_before_its_grammar_is_loaded(rig: Any, message: Any) -> None:
    queue, slow, sent = rig
    assert queue.sift([BOUND, message], sent) == [message]
    (delta,) = sent.items
    assert delta.finish.type == "abort" and not queue.waiting
    slow.loading.set_result("template")
    assert queue.sift([], sent) == []


@pytest.mark.parametrize(
    "message",
    [
        Abort(rid="other"),
        Abort(rid="", exact=False),
        Control(id="1", op="pause_generation", args={"mode": "retract"}),
        Control(id="1", op="server_info"),
    ],
)
def test_what_is_not_meant_for_it_leaves_it_waiting(rig: Any, message: Any) -> None:
    queue, _, sent = rig
    assert queue.sift([BOUND, message], sent) == [message]
    assert list(queue.waiting) == ["bound"] and not sent.items


@pytest.mark.parametrize("op", ["flush_cache", "may_flush"])
def test_a_flush_is_refused_while_a_grammar_is_loaded_but_for_a_pause(rig: Any, op: str) -> None:
    queue, slow, sent = rig
    flush = Control(id="1", op=op)
    assert queue.sift([BOUND, flush], sent) == []
    assert sent.items == [ControlReply(id="1", ok=False)] and list(queue.waiting) == ["bound"]
    slow.paused = True
    assert queue.sift([flush], sent) == [flush]


def test_shutdown_ends_the_compilers_threads() -> None:
    before = set(threading.enumerate())
    with start() as engine:
        ask(engine, regex="a")
        assert any(t.name.startswith("jserve-grammar") for t in set(threading.enumerate()) - before)
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]
    assert not [name for name in left if name.startswith("jserve-grammar")], left
