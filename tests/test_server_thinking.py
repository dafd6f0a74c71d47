"""Chats with a model that thinks: thoughts told from answers, whole and in streams, and which
requests must reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fake_server_engine import Api, FakeEngine, logprob

from jserve.config import Config
from jserve.server.app import create_app
from jserve.types import FinishReason, GenerateRequest, Output

CHAT, GEN = "/v1/chat/completions", "/generate"
HELLO = [{"role": "user", "content": "hi"}]
THOUGHT = "<think>\nlet me < see\n</think>\n\nIt is 4.\n"


class SayingEngine(FakeEngine):
    """Says `says`, `size` bytes an Output."""

    says, size = THOUGHT, 3

    async def _sequence(
        self, req: GenerateRequest, rid: str, prompt_ids: list[int], index: int
    ) -> AsyncGenerator[Output, None]:
        data = self.says.encode()
        for end in range(self.size, len(data) + self.size, self.size):
            ids = list(data[:end])
            new = ids[end - self.size :]
            over = FinishReason(type="stop", matched=257) if end >= len(data) else None
            yield self._output(
                req, rid, prompt_ids, index, self.says[:end], bytes(new).decode(), ids, new, over
            )
            await asyncio.sleep(0)


def api(parser: str | None = "qwen3", says: str = THOUGHT, size: int = 3) -> Api:
    one = Api(reasoning_parser=parser)
    one.engine = SayingEngine(one.config)
    one.engine.says, one.engine.size = says, size
    one.app = create_app(one.engine, one.config)  # type: ignore[arg-type]
    return one


def message(one: Api, **body: Any) -> tuple[str | None, str]:
    answer = one.ok(CHAT, **{"messages": HELLO, **body})["choices"][0]["message"]
    assert answer["role"] == "assistant" and answer["tool_calls"] is None
    return answer["reasoning_content"], answer["content"]


def deltas(one: Api, **body: Any) -> list[tuple[str, str]]:
    """(name, text) of each chunk between the role and the finish."""
    choices = [event["choices"][0] for event in one.events(CHAT, **{"messages": HELLO, **body})]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "stop"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    return [pair for choice in choices[1:-1] for pair in choice["delta"].items()]


def joined(pairs: list[tuple[str, str]], name: str) -> str:
    return "".join(text for one, text in pairs if one == name)


def test_a_message_has_its_reasoning_beside_its_content() -> None:
    assert message(api()) == ("let me < see", "It is 4.")
    assert message(api(says="It is 4.")) == (None, "It is 4.")
    assert message(api(says="<think>and so on")) == ("and so on", "")
    assert message(api("deepseek-r1", "it </think> is")) == ("it", "is")


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_stream_has_the_reasoning_first_and_then_the_content(size: int) -> None:
    pairs = deltas(api(size=size))
    assert joined(pairs, "reasoning_content") == "let me < see"
    assert joined(pairs, "content") == "It is 4."
    names = [name for name, _ in pairs]
    assert names == sorted(names, reverse=True) and all(text for _, text in pairs)
    if size == 1:
        assert names.count("reasoning_content") > 5 and names.count("content") > 5


def test_reasoning_may_come_in_one_piece() -> None:
    pairs = deltas(api(size=1), stream_reasoning=False)
    assert pairs[0] == ("reasoning_content", "let me < see") and len(pairs) > 5
    assert joined(pairs[1:], "content") == "It is 4."
    one = api(says="<think>and so on", size=1)
    assert deltas(one, stream_reasoning=False) == [("reasoning_content", "and so on")]


def test_what_might_have_been_a_tag_comes_with_the_finish() -> None:
    pairs = deltas(api(says="<think>so </thi", size=1))
    assert joined(pairs, "reasoning_content") == "so </thi" and pairs[-1][1] == " </thi"
    assert deltas(api(says="<thi", size=1)) == [("content", "<thi")]


@pytest.mark.parametrize("parser", ["qwen3", None])
def test_text_that_is_not_to_be_split_is_left_as_it_is(parser: str | None) -> None:
    options = {"separate_reasoning": False} if parser else {}
    assert message(api(parser), **options) == (None, THOUGHT)
    assert joined(deltas(api(parser), **options), "content") == THOUGHT


def test_a_split_stream_has_all_logprobs_and_token_ids_in_order() -> None:
    options = {"messages": HELLO, "logprobs": True, "return_token_ids": True, "n": 2}
    events = api(size=5).events(CHAT, **options)
    for index in range(2):
        choices = [one["choices"][0] for one in events if one["choices"][0]["index"] == index]
        ids = [token for one in choices for token in one.get("token_ids", ())]
        entries = [
            one for choice in choices for one in (choice["logprobs"] or {"content": ()})["content"]
        ]
        assert bytes(ids).decode() == THOUGHT
        assert [entry["logprob"] for entry in entries] == [logprob(token) for token in ids]
        pairs = [pair for choice in choices[1:-1] for pair in choice["delta"].items()]
        assert joined(pairs, "reasoning_content") == "let me < see"
        assert joined(pairs, "content") == "It is 4."


def test_blanks_of_an_answer_that_is_bound_to_a_syntax_are_its_own() -> None:
    bound = {"regex": r"\s*It is \d\.\s"}
    assert message(api(), **bound) == ("let me < see", "\n\nIt is 4.\n")
    assert joined(deltas(api(), **bound), "content") == "\n\nIt is 4.\n"


@pytest.mark.parametrize(
    ("parser", "body", "required"),
    [
        (None, {}, False),
        ("qwen3", {}, True),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}, False),
        ("deepseek-v3", {}, False),
        ("deepseek-v3", {"chat_template_kwargs": {"thinking": True}}, True),
        ("deepseek-r1", {"chat_template_kwargs": {"thinking": False}}, True),
        ("qwen3-thinking", {"separate_reasoning": False}, True),
        ("deepseek-v3", {"input_ids": list(b"so: <think>\n")}, True),
        ("deepseek-r1", {"input_ids": list(b"so: <think></think>\n\n")}, False),
        ("qwen3", {"input_ids": list(b"<think> is a tag")}, True),
        ("qwen3-thinking", {"continue_final_message": True}, False),
    ],
)
def test_a_chat_must_reason_when_its_model_thinks(
    parser: str | None, body: dict[str, Any], required: bool
) -> None:
    one = api(parser)
    role = "assistant" if "continue_final_message" in body else "user"
    one.ok(CHAT, messages=[{"role": role, "content": "hi"}], **body)
    (request,) = one.engine.requests
    assert request.require_reasoning is required


def test_a_prompt_that_has_begun_the_thinking_needs_no_tag_in_its_answer() -> None:
    one = api("deepseek-v3", "so </think> 4")
    assert message(one, input_ids=list(b"so: <think>\n")) == ("so", "4")
    assert message(one, input_ids=list(b"so: </think>")) == (None, "so </think> 4")
    one = api("deepseek-r1", "goes on")
    said = [*HELLO, {"role": "assistant", "content": "it"}]
    assert message(one, messages=said, continue_final_message=True) == (None, "goes on")


def test_generate_may_require_reasoning_and_texts_stay_whole() -> None:
    one = api()
    body = one.ok(GEN, text="hi", require_reasoning=True)
    assert body["text"] == THOUGHT and one.engine.requests[0].require_reasoning
    assert one.post(GEN, text="hi", require_reasoning="yes").status_code == 400


def test_model_info_names_the_format() -> None:
    assert api("deepseek-r1").call("GET", "/model_info").json()["reasoning_parser"] == "deepseek-r1"
    assert Api().call("GET", "/model_info").json()["reasoning_parser"] is None


def test_the_flag_is_an_option_of_the_server() -> None:
    config = Config.from_flags(model_path="m", reasoning_parser="qwen3")
    assert config.server.reasoning_parser == "qwen3"
