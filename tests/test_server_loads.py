"""/v1/loads and /get_load: every key, every parameter, and the numbers of a real scheduler."""

from __future__ import annotations

import datetime

import pytest
from fake_engine import make_scheduler
from fake_server_engine import Api
from prometheus_client.parser import text_string_to_metric_families

from jserve.server.loads import core
from jserve.types import SamplingParams, Submit

CORE = (
    *("dp_rank", "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens"),
    *("num_used_tokens", "num_total_tokens", "num_active_tokens", "max_total_num_tokens"),
    *("max_running_requests", "token_usage", "gen_throughput", "cache_hit_rate", "utilization"),
)


def loads(api: Api, query: str = "") -> dict:
    response = api.call("GET", f"/v1/loads{query}")
    assert response.status_code == 200, response.text
    return response.json()


def test_a_load_has_every_core_key_in_an_envelope() -> None:
    body = loads(Api(), "?include=core")
    assert set(body) == {"timestamp", "version", "accelerator", "num_accelerators", "loads"}
    assert datetime.datetime.fromisoformat(body["timestamp"]).tzinfo is not None
    (load,) = body["loads"]
    assert tuple(load) == CORE
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (2, 1)
    assert load["max_total_num_tokens"] == 4096


@pytest.mark.parametrize(
    ("query", "sections"),
    [
        ("", {"memory", "queues"}),
        ("?include=all", {"memory", "queues"}),
        ("?include=core,disagg,queues,memory", {"memory", "queues"}),
        ("?include=core,queues&dp_rank=0&format=json", {"queues"}),
        ("?include=spec", set()),
        ("?include=lora, memory", {"memory"}),
    ],
)
def test_sections_are_added_as_asked_and_core_keys_are_always_there(
    query: str, sections: set[str]
) -> None:
    (load,) = loads(Api(), query)["loads"]
    assert set(load) == {*CORE, *sections}
    if "queues" in sections:
        assert load["queues"] == {"waiting": 1, "grammar": 0, "paused": 0, "retracted": 0}


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("include=core,nonsense", "include"),
        ("include=", "include"),
        ("dp_rank=1", "dp_rank"),
        ("dp_rank=x", "dp_rank"),
        ("format=xml", "format"),
        ("colour=red", "colour"),
    ],
)
def test_what_is_not_known_is_refused_by_name(query: str, name: str) -> None:
    response = Api().call("GET", f"/v1/loads?{query}")
    assert response.status_code == 400
    assert response.json()["param"] == name and name in response.json()["message"]


@pytest.mark.parametrize("prefix", ["sglang", "jserve"])
def test_the_prometheus_format_has_a_gauge_for_every_number(prefix: str) -> None:
    api = Api(metrics_prefix=prefix)
    response = api.call("GET", "/v1/loads?format=prometheus")
    assert response.headers["content-type"].startswith("text/plain")
    shown = {family.name: family for family in text_string_to_metric_families(response.text)}
    (load,) = loads(api)["loads"]
    for key in CORE[1:]:
        family = shown[f"{prefix}_{key}"]
        assert family.type == "gauge" and family.samples[0].labels == {"dp_rank": "0"}
        assert family.samples[0].value == load[key]
    assert shown[f"{prefix}_queues_waiting"].samples[0].value == 1
    assert len(shown) == len(CORE) - 1 + len(load["queues"]) + len(load["memory"])


def test_get_load_answers_in_its_old_shape() -> None:
    (load,) = Api().call("GET", "/get_load").json()
    assert load == {"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 48}


def test_a_load_is_what_the_scheduler_has_computed_by_hand() -> None:
    """Slots for two: the first prompt is cached, the third is cut after a page, two more wait."""
    scheduler = make_scheduler(num_slots=2, chunked_prefill_size=64)

    def submit(rid: str, prompt: list[int]) -> None:
        sampling = SamplingParams(max_new_tokens=30, temperature=0.0)
        scheduler.submit(Submit(rid=rid, prompt_ids=prompt, sampling=sampling))

    submit("a", list(range(40)))
    assert scheduler.plan() is not None
    submit("b", list(range(100, 200)))
    submit("c", list(range(50)))
    submit("d", list(range(30)))
    assert scheduler.plan() is not None  # decodes a, and computes 63 → 60 tokens of b
    load = core(0, scheduler.stats(), {"max_running_requests": 2})
    used = 44 + 60  # whole pages: a has 41 tokens
    expected = {
        "num_running_reqs": 2,
        "num_waiting_reqs": 2,
        "num_waiting_uncached_tokens": 80 + 40,  # none was cached so far; 40 of b are left
        "num_used_tokens": used,
        "num_total_tokens": used + 80,
        "num_active_tokens": used + 80,
        "max_total_num_tokens": 399 * 4,
        "token_usage": round(used / (399 * 4), 4),
        "utilization": 1.0,  # both slots are taken
        "cache_hit_rate": 0.0,
    }
    assert {name: load[name] for name in expected} == expected


def test_what_waits_is_expected_to_be_cached_like_what_came_before() -> None:
    gauges = {"num_waiting_tokens": 100.0, "cache_hit_rate": 0.75, "num_chunked_tokens": 40.0}
    assert core(0, gauges, {})["num_waiting_uncached_tokens"] == 65
