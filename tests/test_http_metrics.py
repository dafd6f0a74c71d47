"""HTTP exchanges by endpoint, method and status: also those that are refused."""

from __future__ import annotations

import httpx
import pytest
from fake_server_engine import Api
from prometheus_client.parser import text_string_to_metric_families
from test_server_live import HANG, running, wait_for

from jserve.metrics.families import FAMILIES

CHAT, GEN = "/v1/chat/completions", "/generate"


def shown(text: str, name: str) -> dict[tuple[str, ...], float]:
    """Of a family the values by labels, in the order of the contract."""
    names = FAMILIES[name].label[0].split()
    for family in text_string_to_metric_families(text):
        if family.name == f"jserve:{name.removesuffix('_total')}":
            assert all(set(sample.labels) == set(names) for sample in family.samples)
            return {tuple(s.labels[n] for n in names): s.value for s in family.samples}
    raise AssertionError(f"{name} is not shown")


def scrape(api: Api, name: str) -> dict[tuple[str, ...], float]:
    return shown(api.call("GET", "/metrics").text, name)


def test_every_answer_counts_under_its_status_also_a_refusal() -> None:
    api = Api(enable_metrics=True)
    for body in ({"text": "a"}, {"text": "b"}, {"text": 3}, {"nonsense": 1}):
        api.post(GEN, **body)
    api.post(CHAT, messages=[])
    api.call("GET", CHAT)
    api.call("GET", "/v1/models/fake/model")
    api.call("GET", "/v1/models/other")
    for path in ("/wp-login.php", "/.env", "/v2/x"):
        api.call("GET", path)
    api.call("BREW", "/generate")
    api.engine.queue_full = True
    api.post(GEN, text="a")
    answers = scrape(api, "http_responses_total")
    assert answers == {
        (GEN, "200", "POST"): 2,
        (GEN, "400", "POST"): 2,
        (GEN, "503", "POST"): 1,
        (GEN, "405", "other"): 1,
        (CHAT, "400", "POST"): 1,
        (CHAT, "405", "GET"): 1,
        ("/v1/models/{model:path}", "200", "GET"): 1,
        ("/v1/models/{model:path}", "404", "GET"): 1,
        ("other", "404", "GET"): 3,
    }
    requests = scrape(api, "http_requests_total")
    assert requests[(GEN, "POST")] == 5 and requests[("/metrics", "GET")] == 2
    active = scrape(api, "http_requests_active")
    assert {labels for labels, n in active.items() if n} == {("/metrics", "GET")}


def test_a_fault_of_ours_and_a_missing_key_count_too() -> None:
    api = Api(enable_metrics=True, api_key="key")
    assert api.post(GEN, text="a").status_code == 401
    api.engine.model_config = None
    headers = {"authorization": "Bearer key"}
    body = {"prompt": "a"}
    answer = api.call("POST", "/v1/completions", strict=False, json=body, headers=headers)
    assert answer.status_code == 500
    answers = scrape(api, "http_responses_total")
    assert answers[(GEN, "401", "POST")] == answers[("/v1/completions", "500", "POST")] == 1


def test_a_stream_is_active_until_it_ends() -> None:
    api = Api(enable_metrics=True)
    with running(api) as (host, port), httpx.Client(base_url=f"http://{host}:{port}") as client:

        def active() -> float:
            text = client.get("/metrics").text
            return shown(text, "http_requests_active").get((GEN, "POST"), 0.0)

        with client.stream("POST", GEN, json=HANG | {"stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            assert active() == 1
        wait_for(lambda: active() == 0)


def test_without_metrics_nothing_is_in_the_way() -> None:
    api = Api()
    assert [one.cls.__name__ for one in api.app.user_middleware] == []
    assert api.call("GET", "/metrics").status_code == 404


@pytest.mark.parametrize("name", ["http_requests_total", "http_responses_total"])
def test_before_the_first_request_the_family_is_there_and_empty(name: str) -> None:
    assert FAMILIES[name].series(name) == []
