"""/v1/loads and /get_load: how busy the engine is, for routers.

From its latest gauges: asking costs the engine nothing, and the answer is at most a moment old.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jserve import __version__
from jserve.config import num_replicas
from jserve.errors import RequestError
from jserve.metrics import CONTENT_TYPE
from jserve.server.exchange import Serving
from jserve.server.replies import json_response

_SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
_FORMATS = ("json", "prometheus")
_GIB = 1 << 30


class LoadRoutes:
    """`include` adds sections to the core keys (all by default); those of features that are not
    there are left out."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def loads(self, request: Request) -> Response:
        """The load of each data-parallel rank that lives, or of the one that is asked for."""
        query, engine = request.query_params, self._serving.engine
        ranks, asked = engine.ranks, query.get("dp_rank")
        if asked is not None:
            _check("dp_rank", asked, tuple(str(rank) for rank, _, _ in ranks))
            ranks = [one for one in ranks if str(one[0]) == asked]
        _check("format", form := query.get("format", "json"), _FORMATS)
        wanted = [section.strip() for section in query.get("include", "all").split(",")]
        for section in wanted:
            _check("include", section, _SECTIONS)
        loads = [_load(*rank, wanted) for rank in ranks]
        if form == "prometheus":
            prefix = self._serving.config.server.metrics_prefix
            return Response(_exposition(prefix, loads), media_type=CONTENT_TYPE)
        execution = self._serving.config.execution
        replicas = len(engine.ranks) if num_replicas(execution) > 1 else 1
        envelope = {
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
            "version": __version__,
            "accelerator": engine.server_info.get("device", "unknown"),
            "num_accelerators": execution.tp_size * execution.ep_size * replicas,
            "loads": loads,
        }
        return json_response(envelope)

    async def get_load(self, request: Request) -> Response:
        return json_response([_old_load(core(*rank)) for rank in self._serving.engine.ranks])


def _load(
    rank: int, gauges: Mapping[str, float], info: Mapping[str, Any], wanted: Sequence[str]
) -> dict[str, Any]:
    """The core keys, and the sections that are wanted."""
    sections = {"memory": _memory(gauges, info), "queues": _queues(gauges)}
    asked = {name: keys for name, keys in sections.items() if {name, "all"} & set(wanted)}
    return core(rank, gauges, info) | asked


def _old_load(load: Mapping[str, Any]) -> dict[str, Any]:
    running, waiting = load["num_running_reqs"], load["num_waiting_reqs"]
    keys = {"num_reqs": running + waiting, "num_waiting_reqs": waiting}
    return {"dp_rank": load["dp_rank"], **keys, "num_tokens": load["num_used_tokens"]}


def core(rank: int, gauges: Mapping[str, float], info: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that every load has.

    What a waiting prompt will find in the cache is known only when it is admitted, so its uncached
    tokens are estimated by the last hit rate. Without prefill/decode disaggregation every token is
    active that is used or waited for.
    """

    def count(name: str) -> int:
        return int(gauges.get(name, 0))

    hit_rate, waiting = gauges.get("cache_hit_rate", 0.0), count("num_waiting_tokens")
    total = count("num_used_tokens") + waiting
    return {
        "dp_rank": rank,
        "num_running_reqs": count("num_running_reqs"),
        "num_waiting_reqs": count("num_queue_reqs"),
        "num_waiting_uncached_tokens": round(waiting * (1 - hit_rate))
        + count("num_chunked_tokens"),
        "num_used_tokens": count("num_used_tokens"),
        "num_total_tokens": total,
        "num_active_tokens": total,
        "max_total_num_tokens": count("max_total_num_tokens")
        or int(info.get("max_total_num_tokens", 0)),
        "max_running_requests": int(info.get("max_running_requests", 0)),
        "token_usage": round(gauges.get("token_usage", 0.0), 4),
        "gen_throughput": round(gauges.get("gen_throughput", 0.0), 2),
        "cache_hit_rate": round(hit_rate, 4),
        "utilization": round(gauges.get("utilization", 0.0), 4),
    }


def _memory(gauges: Mapping[str, float], info: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "weight_gb": round(info.get("weight_bytes", 0) / _GIB, 3),
        "token_capacity": int(gauges.get("max_total_num_tokens", 0)),
    }


def _queues(gauges: Mapping[str, float]) -> dict[str, int]:
    names = {"waiting": "queue", "grammar": "grammar_queue", "paused": "paused"}
    names["retracted"] = "retracted"
    return {key: int(gauges.get(f"num_{name}_reqs", 0)) for key, name in names.items()}


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RequestError(f"{name} must be one of {', '.join(known)}, got {value!r}.", name)


def _exposition(prefix: str, loads: Sequence[Mapping[str, Any]]) -> str:
    """Gauges named prefix_key or prefix_section_key, of each rank."""
    lines: dict[str, list[str]] = {}
    for load in loads:
        flat = {key: value for key, value in load.items() if not isinstance(value, dict)}
        for section in ("memory", "queues"):
            flat |= {f"{section}_{key}": value for key, value in load.get(section, {}).items()}
        rank = flat.pop("dp_rank")
        for key, value in flat.items():
            name = f"{prefix}_{key}"
            samples = lines.setdefault(name, [f"# TYPE {name} gauge"])
            samples.append(f'{name}{{dp_rank="{rank}"}} {value}')
    return "\n".join(line for samples in lines.values() for line in samples) + "\n"
