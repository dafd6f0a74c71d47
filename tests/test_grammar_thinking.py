"""Answers that think first, through the whole engine: their grammar begins where that has ended."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from fake_engine import ByteTokenizer, continuation
from grammar_engine import BEGIN, CLOSE, END, EndingTokenizer, TagTokenizer
from test_grammar_engine import SCHEMA, kind

from jserve.engine.engine import Engine
from jserve.engine.reasoner import Reasoner
from jserve.errors import ConfigError, RequestError
from jserve.server.app import create_app
from jserve.types import Thinking


def start(parser: str | None, tokenizer: ByteTokenizer) -> Engine:
    return Engine(
        model_path="fake",
        inline=True,
        builder="grammar_engine:build_thinking",
        tokenizer=tokenizer,  # type: ignore[arg-type]
        reasoning_parser=parser,
        grammar_backend="llguidance",
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Its tags are of several tokens, and it always thinks."""
    with start("deepseek-r1", EndingTokenizer()) as engine:
        yield engine


@pytest.fixture(scope="module")
def opening() -> Iterator[Engine]:
    """Its tags are tokens, and its answers open their thinking."""
    with start("qwen3", TagTokenizer()) as engine:
        yield engine


def ask(engine: Engine, prompt: str, reasons: bool = True, **sampling: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": 60} | sampling
    return engine.generate(prompt, params, require_reasoning=reasons)


def test_a_grammar_begins_where_the_thinking_has_ended(engine: Engine) -> None:
    body = ask(engine, "why?", json_schema=SCHEMA)
    thought, end, answer = body["text"].partition("</think>")
    assert thought == "AB." and end and kind(body) == "stop"
    jsonschema.validate(json.loads(answer), SCHEMA)


def test_a_grammar_that_does_not_wait_for_thinking_holds_from_the_first_token(
    engine: Engine,
) -> None:
    body = ask(engine, "why?", reasons=False, regex=r"[A-F]{3}-\d{2}")
    assert re.fullmatch(r"[A-F]{3}-\d{2}", body["text"])


def test_an_answer_must_not_end_while_it_thinks(engine: Engine) -> None:
    body = ask(engine, "why#", regex="ab", max_new_tokens=30)
    assert kind(body) == "length" and len(body["output_ids"]) == 30
    assert body["output_ids"][0] == END + 1  # the next one that is allowed
    assert ask(engine, "why#", reasons=False, regex="(ab)?")["output_ids"] == [END]


def test_forced_text_is_appended_behind_the_thinking_only(engine: Engine) -> None:
    def appended() -> int:
        return engine.get_server_info()["num_jump_forward_tokens_total"]

    before = appended()
    ask(engine, "why", regex="a long text that is forced", max_new_tokens=20)
    assert appended() == before
    body = ask(engine, "why?", regex="a long text that is forced")
    assert body["text"] == "AB.</think>a long text that is forced" and kind(body) == "stop"
    assert appended() > before + 20


def test_the_first_token_decides_where_thinking_must_be_opened(opening: Engine) -> None:
    body = ask(opening, "think!", regex=r"[A-F]{3}-\d{2}")
    assert body["output_ids"][:3] == [BEGIN, 3, CLOSE]
    assert re.fullmatch(r"<think>\x03</think>[A-F]{3}-\d{2}", body["text"]) and kind(body) == "stop"
    body = ask(opening, "answer", regex=r"[A-F]{3}-\d{2}")
    assert re.fullmatch(r"[A-F]{3}-\d{2}", body["text"]) and kind(body) == "stop"
    body = ask(opening, "think!", reasons=False, regex=r"[A-F]{3}-\d{2}")
    assert re.fullmatch(r"[A-F]{3}-\d{2}", body["text"]) and kind(body) == "stop"


def test_a_prompt_that_has_begun_or_ended_the_thinking_decides_before(opening: Engine) -> None:
    body = ask(opening, "so <think>\n", regex="ab", max_new_tokens=9)
    assert kind(body) == "length" and len(body["text"]) == 9  # thoughts without an end
    body = ask(opening, "so <think>\n\n</think>\n\n", regex="ab")
    assert body["text"] == "ab" and kind(body) == "stop"


def test_all_of_n_sequences_and_of_a_batch_think_beside_free_ones(engine: Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 40, "regex": r"\d{3}"}
    bodies = engine.generate(
        ["one?", "another one?"], params | {"n": 2}, require_reasoning=True, return_logprob=True
    )
    assert len(bodies) == 4
    for body in bodies:
        assert re.fullmatch(r"AB\.</think>\d{3}", body["text"]) and kind(body) == "stop"
        assert len(body["meta_info"]["output_token_logprobs"]) == len(body["text"]) + 1
    free = {"temperature": 0, "max_new_tokens": 20}
    plain, bound = engine.generate(["free", "one?"], [free, params], require_reasoning=True)
    assert plain["output_ids"] == continuation(list(b"free"), 20)
    assert re.fullmatch(r"AB\.</think>\d{3}", bound["text"])


def test_what_is_retracted_goes_on_in_its_thought_or_its_answer(engine: Engine) -> None:
    async def run(pauses: list[int]) -> dict[str, Any]:
        params = {"regex": "[a-z]{300}", "temperature": 0, "max_new_tokens": 400}
        body: dict[str, Any] = {}
        async for body in await engine.async_generate(
            f"{pauses}?", params, stream=True, require_reasoning=True
        ):
            if pauses and len(body["output_ids"]) >= pauses[0]:
                pauses.pop(0)
                assert (await engine.control("pause_generation", mode="retract")).ok
                assert (await engine.control("continue_generation")).ok
        return body

    body = asyncio.run(run([2, 7, 30]))
    assert re.fullmatch(r"AB\.</think>[a-z]{300}", body["text"]) and kind(body) == "stop"
    assert body["meta_info"]["num_retractions"] == 3
    assert engine.get_server_info()["cache_active_references"] == 0


def thoughts(body: dict[str, Any]) -> int:
    return body["meta_info"]["reasoning_tokens"]


def test_tokens_of_thoughts_are_counted_up_to_the_tag_that_ends_them(
    engine: Engine, opening: Engine
) -> None:
    assert thoughts(ask(engine, "why?", regex=r"\d{3}")) == len("AB.</think>")
    assert thoughts(ask(engine, "why?", reasons=False, regex=r"\d{3}")) == 0
    assert thoughts(ask(engine, "why", max_new_tokens=9)) == 9  # without an end
    assert thoughts(ask(engine, "over </think>", max_new_tokens=9)) == 0
    assert thoughts(ask(opening, "think!", regex="ab")) == 3  # the tags are tokens
    assert thoughts(ask(opening, "answer", regex="ab")) == 0
    assert thoughts(ask(opening, "so <think>", max_new_tokens=5)) == 5


def test_thoughts_are_counted_in_batches_and_as_they_stream(engine: Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 40, "regex": r"\d{3}"}
    bodies = engine.generate(["one?", "two?"], params | {"n": 2}, require_reasoning=True)
    assert [thoughts(body) for body in bodies] == [11] * 4
    last: dict[int, list[int]] = {}
    stream = engine.generate(["one?", "two?"], params, require_reasoning=True, stream=True)
    for body in stream:
        last.setdefault(body["index"], []).append(thoughts(body))
    for counts in last.values():
        assert counts == sorted(counts) and counts[0] < 11 and counts[-1] == 11


def test_reasoning_cannot_be_required_without_the_flag() -> None:
    with start(None, EndingTokenizer()) as engine:
        for sampling in ({"regex": "ab"}, {}):
            with pytest.raises(RequestError, match="--reasoning-parser") as info:
                ask(engine, "why?", **sampling)
            assert info.value.param == "require_reasoning"
        assert ask(engine, "x", reasons=False, regex="ab")["text"] == "ab"


# ---- over HTTP


class ChatTokenizer(TagTokenizer):
    """A chat template without roles."""

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        return self.encode("".join(one["content"] for one in messages))


def post(engine: Engine, path: str, **body: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(engine, engine.config))
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            return await client.post(path, json=body)

    return asyncio.run(send())


def test_a_chat_thinks_and_then_answers_by_its_schema() -> None:
    with start("qwen3", ChatTokenizer()) as engine:
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        chat = {"response_format": schema, "temperature": 0, "max_tokens": 60}
        for question, reasoning in (("think!", "\x03"), ("answer", None)):
            messages = [{"role": "user", "content": question}]
            reply = post(engine, "/v1/chat/completions", messages=messages, **chat).json()
            (choice,) = reply["choices"]
            assert choice["finish_reason"] == "stop"
            assert choice["message"]["reasoning_content"] == reasoning
            assert reply["usage"]["reasoning_tokens"] == (3 if reasoning else 0)
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_generate_refuses_reasoning_that_the_server_does_not_know() -> None:
    with start(None, EndingTokenizer()) as engine:
        reply = post(engine, "/generate", text="why?", require_reasoning=True)
        assert reply.status_code == 400 and "--reasoning-parser" in reply.text
        reply = post(engine, "/generate", text="x", sampling_params={"max_new_tokens": 2})
        assert reply.status_code == 200


def test_a_refusal_names_the_field_of_the_body_that_was_sent() -> None:
    schema = {"not": {"type": "string"}}
    where = "response_format.json_schema.schema"
    asked = {
        where: {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        "response_format": {"response_format": {"type": "structural_tag", "format": {}}},
        "json_schema": {"json_schema": schema},
        "regex": {"regex": "(?=a)b"},
    }
    with start(None, ChatTokenizer()) as engine:
        for field, body in asked.items():
            messages = [{"role": "user", "content": "hi"}]
            reply = post(engine, "/v1/chat/completions", messages=messages, **body)
            error = reply.json()
            assert reply.status_code == 400 and error["param"] == field, error
            assert error["message"].startswith(f"Failed to compile {field} grammar: "), error


# ---- the flag and the model


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_a_model_that_must_open_its_thinking_needs_a_token_for_that(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--reasoning-parser {name} .*--model-path fake.*<think>"
    ):
        start(name, EndingTokenizer())


def test_tags_that_texts_leave_out_are_refused() -> None:
    class Hiding(TagTokenizer):
        def pieces(self, ids: Any, skip_special_tokens: bool) -> list[bytes]:
            plain = super().pieces(ids, skip_special_tokens)
            return [
                b"" if i == CLOSE and skip_special_tokens else piece
                for i, piece in zip(ids, plain, strict=True)
            ]

    with pytest.raises(ConfigError, match="--reasoning-parser deepseek-r1 .*</think>"):
        start("deepseek-r1", Hiding())


def test_an_unknown_format_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="--reasoning-parser must be one of deepseek-r1"):
        start("gpt", EndingTokenizer())


def test_tags_become_the_models_tokens() -> None:
    tags: Any = TagTokenizer()
    plain: Any = EndingTokenizer()
    assert Reasoner("qwen3", tags, "m").thinking([65]) == Thinking(end=(CLOSE,), begin=BEGIN)
    assert Reasoner("qwen3", tags, "m").thinking([65, BEGIN, 10]) == Thinking(end=(CLOSE,))
    assert Reasoner("qwen3", tags, "m").thinking([BEGIN, CLOSE]) is None
    assert Reasoner("deepseek-v3", tags, "m").thinking([]) == Thinking(end=(CLOSE,), begin=BEGIN)
    assert Reasoner("deepseek-r1", plain, "m").thinking([65]) == Thinking(end=tuple(b"</think>"))
    assert Reasoner("qwen3-thinking", plain, "m").thinking(list(b"</think>")) is None
