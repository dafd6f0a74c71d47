"""The OpenAI routes over a fake engine: shapes, streams, logprobs, usage, defaults."""

from __future__ import annotations

import pytest
from fake_server_engine import BOS, Api, expected, logprob

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
HELLO_IDS = list(b"user:hi\nassistant:")
ABC_IDS = [BOS, *b"abc"]


def test_a_chat_completion_has_the_openai_shape():
    body = Api().ok(CHAT, model="fake/model", messages=HELLO, max_tokens=4, rid="one")
    choice = body["choices"][0]
    assert (body["id"], body["object"], body["model"]) == ("one", "chat.completion", "fake/model")
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == expected(HELLO_IDS, 4)
    assert (choice["finish_reason"], choice["matched_stop"]) == ("length", None)
    assert choice["logprobs"] is None and body["metadata"] == {"weight_version": "default"}
    assert body["usage"] == {
        "prompt_tokens": len(HELLO_IDS),
        "completion_tokens": 4,
        "total_tokens": len(HELLO_IDS) + 4,
        "reasoning_tokens": 0,
        "prompt_tokens_details": None,
    }


def test_cached_tokens_are_reported_only_under_the_flag():
    api = Api(enable_cache_report=True)
    usage = api.ok(CHAT, messages=HELLO, max_tokens=1, n=2)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert usage["prompt_tokens"] == len(HELLO_IDS) and usage["completion_tokens"] == 2


def test_without_max_tokens_chat_may_fill_the_context_and_completions_get_16():
    api = Api()
    assert api.ok(CHAT, messages=HELLO)["usage"]["total_tokens"] == 200
    assert api.ok(TEXT, prompt="abc")["usage"]["completion_tokens"] == 16
    assert api.ok(CHAT, messages=HELLO, max_completion_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_chat_stream_is_a_role_chunk_then_deltas_then_a_finish_chunk_then_usage():
    options = {"include_usage": True}
    events = Api().events(CHAT, messages=HELLO, max_tokens=3, stream_options=options)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == expected(HELLO_IDS, 3)
    assert deltas[-1] == {} and len(deltas) == 5
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 3
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_continuous_usage_counts_in_every_chunk():
    options = {"continuous_usage_stats": True}
    events = Api().events(TEXT, prompt="abc", max_tokens=3, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3]


def test_a_stream_carries_the_same_text_and_logprobs_as_one_answer():
    api = Api()
    options = {"messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": 2, "n": 2}
    whole = api.ok(CHAT, **options)
    parts = {0: ["", []], 1: ["", []]}
    for event in api.events(CHAT, **options):
        choice = event["choices"][0]
        parts[choice["index"]][0] += choice["delta"].get("content", "")
        if choice["logprobs"]:
            parts[choice["index"]][1] += choice["logprobs"]["content"]
    for choice in whole["choices"]:
        assert parts[choice["index"]] == [
            choice["message"]["content"],
            choice["logprobs"]["content"],
        ]
    assert whole["choices"][0]["message"]["content"] != whole["choices"][1]["message"]["content"]


def test_chat_logprobs_give_the_chosen_token_one_value():
    body = Api().ok(CHAT, messages=HELLO, max_tokens=1, logprobs=True, top_logprobs=3)
    entry = body["choices"][0]["logprobs"]["content"][0]
    token = expected(HELLO_IDS, 1)
    assert (entry["token"], entry["bytes"]) == (token, [ord(token)])
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == logprob(ord(token))
    assert len(entry["top_logprobs"]) == 3


def test_completion_logprobs_have_the_legacy_shape_and_echo_scores_the_prompt():
    body = Api().ok(TEXT, prompt="abc", max_tokens=2, logprobs=2, echo=True)
    choice = body["choices"][0]
    new = expected(ABC_IDS, 2)
    assert choice["text"] == "abc" + new
    table = choice["logprobs"]
    assert table["tokens"] == ["<256>", "a", "b", "c", *new]
    assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None
    assert table["text_offset"] == [0, 0, 1, 2, 3, 4]
    for token, value, top in zip(
        table["tokens"][1:], table["token_logprobs"][1:], table["top_logprobs"][1:], strict=True
    ):
        assert value == logprob(ord(token)) == top[token] == max(top.values())
        assert len(top) == 2


def test_tokens_that_are_no_whole_characters_are_named_by_their_bytes():
    prompt = [0xC3, 0xA9, ord("x")]
    body = Api().ok(TEXT, prompt=prompt, max_tokens=1, logprobs=0, echo=True)
    table = body["choices"][0]["logprobs"]
    assert body["choices"][0]["text"].startswith("éx")
    assert table["tokens"][:3] == ["bytes:\\xc3", "bytes:\\xa9", "x"]
    assert table["text_offset"][:4] == [0, 0, 1, 2]


def test_a_completion_stream_echoes_once_and_its_logprobs_add_up():
    api = Api()
    options = {"prompt": "abc", "max_tokens": 3, "logprobs": 1, "echo": True}
    whole = api.ok(TEXT, **options)["choices"][0]
    chunks = [event["choices"][0] for event in api.events(TEXT, **options)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for column, values in whole["logprobs"].items():
        assert [one for chunk in chunks for one in chunk["logprobs"][column]] == values
    assert [chunk["finish_reason"] for chunk in chunks] == [None, None, "length"]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("abc", [ABC_IDS]),
        (["abc", "b"], [ABC_IDS, [BOS, ord("b")]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_a_prompt_may_be_text_or_ids_or_a_list_of_either(prompt, ids):
    body = Api().ok(TEXT, prompt=prompt, max_tokens=2, n=2)
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == [expected(one, 2, index) for one in ids for index in range(2)]
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(ids)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert body["usage"]["completion_tokens"] == 4 * len(ids)


def test_stop_strings_and_stop_tokens_are_reported_as_matched_stop():
    api = Api()
    text = expected(ABC_IDS, 8)
    body = api.ok(TEXT, prompt="abc", stop=[text[2:4]])["choices"][0]
    assert (body["text"], body["finish_reason"]) == (text[:2], "stop")
    assert body["matched_stop"] == text[2:4]
    body = api.ok(TEXT, prompt="abc", stop_token_ids=[ord(text[1])])["choices"][0]
    assert (body["finish_reason"], body["matched_stop"]) == ("stop", ord(text[1]))


def test_every_sampling_field_reaches_the_engine():
    api = Api()
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.3,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "n": 2,
    }
    renamed = {"max_tokens": 5, "min_tokens": 2, "seed": -9, "logit_bias": {"65": -3}, "stop": "§"}
    api.ok(
        TEXT, prompt="abc", **given, **renamed, stop_token_ids=[5], extra_key="e", cache_salt="s"
    )
    request = api.engine.requests[-1]
    sampling = request.sampling
    assert {name: getattr(sampling, name) for name in given} == given
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.sampling_seed) == (5, 2, -9)
    assert (sampling.logit_bias, sampling.stop, sampling.stop_token_ids) == (
        {65: -3.0},
        ("§",),
        (5,),
    )
    assert (request.extra_key, request.cache_salt) == ("e", "s")


def test_the_models_own_defaults_fill_what_a_chat_request_leaves_open():
    api = Api()
    api.engine.sampling_defaults = {"temperature": 0.6, "top_k": -1, "top_p": 0.8}
    api.ok(CHAT, messages=HELLO, max_tokens=1, top_p=0.5)
    sampling = api.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, -1, 0.5)
    api.ok(TEXT, prompt="abc", max_tokens=1)
    assert api.engine.requests[-1].sampling.temperature == 1.0


def test_messages_reach_the_template_with_text_parts_joined_and_developer_as_system():
    api = Api()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": "so", "reasoning_content": "r", "tool_calls": []},
    ]
    kwargs = {"enable_thinking": False}
    api.ok(
        CHAT,
        messages=messages,
        max_tokens=1,
        continue_final_message=True,
        chat_template_kwargs=kwargs,
    )
    rendered, options = api.engine.tokenizer.rendered[-1]
    assert rendered == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a b", "name": "me"},
        {"role": "assistant", "content": "so", "reasoning_content": "r"},
    ]
    assert options == {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "enable_thinking": False,
    }


def test_a_long_chat_is_rendered_off_the_event_loop_with_the_same_error():
    response = Api().post(CHAT, messages=[{"role": "user", "content": "x" * 40_000}])
    assert response.status_code == 400 and "context length" in response.json()["message"]


def test_input_ids_stand_in_for_the_messages_and_token_ids_are_returned_when_asked_for():
    api = Api()
    body = api.ok(CHAT, messages=HELLO, input_ids=[97, 98], max_tokens=2, return_token_ids=True)
    assert body["prompt_token_ids"] == [97, 98] and api.engine.tokenizer.rendered == []
    assert bytes(body["choices"][0]["token_ids"]).decode() == expected([97, 98], 2)
    events = api.events(CHAT, input_ids=[97, 98], max_tokens=2, return_token_ids=True)
    choices = [event["choices"][0] for event in events]
    assert choices[0]["prompt_token_ids"] == [97, 98]
    assert [choice.get("token_ids") and len(choice["token_ids"]) for choice in choices] == [
        *(None, 1, 1, None),
    ]
    chunks = api.events(TEXT, prompt=[97, 98], max_tokens=2, return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98], None]
    assert bytes(i for choice in choices for i in choice["token_ids"]).decode() == expected(
        [97, 98], 2
    )


def test_rids_are_the_callers_and_numbered_over_a_batch():
    api = Api()
    assert api.ok(TEXT, prompt=["a", "b"], rid="r", max_tokens=1)["id"] == "r_0"
    assert [request.rid for request in api.engine.requests] == ["r_0", "r_1"]
    api.ok(TEXT, prompt=["a", "b"], rid=["x", "y"], max_tokens=1)
    assert [request.rid for request in api.engine.requests[2:]] == ["x", "y"]


def test_nulls_and_idle_values_of_missing_features_count_as_absent():
    idle = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "regex": None,
        "lora_path": "",
        "priority": 0,
        "store": False,
        "temperature": None,
        "stream_options": None,
        "n": None,
        "user": "me",
        "parallel_tool_calls": False,
        "modalities": ["text"],
    }
    assert Api().ok(CHAT, messages=HELLO, max_tokens=1, **idle)["choices"][0]["message"]["content"]


def test_models_are_listed_and_served_under_their_names():
    api = Api(served_model_name="little")
    card = api.call("GET", "/v1/models").json()["data"][0]
    assert (card["id"], card["root"], card["max_model_len"]) == ("little", "fake/model", 200)
    assert api.call("GET", "/v1/models/fake/model").json()["id"] == "little"
    assert api.call("GET", "/v1/models/other").status_code == 404
    for name in ("little", "fake/model", "default"):
        assert api.ok(TEXT, model=name, prompt="a", max_tokens=1)["model"] == "little"
