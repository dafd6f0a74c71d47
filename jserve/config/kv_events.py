"""What --kv-events-config says: where cache events go. Opens no socket."""

from __future__ import annotations

import dataclasses

from jserve.config.json_object import read_object
from jserve.errors import ConfigError

_FLAG = "--kv-events-config"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsOptions:
    """Names and defaults of the JSON keys; endpoints as ZMQ spells them."""

    publisher: str = "null"  # or zmq
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None  # None: missed batches cannot be asked for
    buffer_steps: int = 10_000  # batches kept for replay
    hwm: int = 100_000  # batches that ZMQ keeps for a slow subscriber; beyond, it loses some
    max_queue_size: int = 100_000  # changes that wait to be hashed; beyond, some are left out
    topic: str = ""
    rank: int = 0  # no key: the data-parallel rank that they tell of


def kv_events_options(text: str | None, rank: int = 0) -> KvEventsOptions | None:
    """Of a data-parallel rank; None: no events are wanted. Raises ConfigError."""
    names = {field.name: field.default for field in dataclasses.fields(KvEventsOptions)}
    del names["rank"]
    options = KvEventsOptions(**read_object(_FLAG, text, names), rank=rank)
    if options.publisher not in ("null", "zmq"):
        raise ConfigError(f"{_FLAG}: publisher must be null or zmq, got {options.publisher!r}")
    endpoints = {"endpoint": options.endpoint, "replay_endpoint": options.replay_endpoint}
    for name, value in endpoints.items():
        if value is not None and "://" not in value:
            example = "tcp://*:5557 or ipc://events.sock"
            raise ConfigError(f"{_FLAG}: {name} must be like {example}, got {value!r}")
        if value is not None and value.startswith("tcp://"):
            _check_port(name, value)
    if options.publisher == "null":
        return None
    own = {name: value and _endpoint_of(rank, value, name) for name, value in endpoints.items()}
    return dataclasses.replace(options, **own)


def check_apart(text: str | None, num_ranks: int) -> None:
    """Raises ConfigError when two ranks, or what one publishes and replays, share an endpoint."""
    seen: dict[str, str] = {}
    for rank in range(num_ranks):
        options = kv_events_options(text, rank)
        if options is None:
            return
        own = {"endpoint": options.endpoint, "replay_endpoint": options.replay_endpoint}
        for name, value in own.items():
            who = f"{name} of data-parallel rank {rank}"
            if value is not None and seen.setdefault(value, who) != who:
                raise ConfigError(
                    f"{_FLAG}: {value} is the {seen[value]} and the {who}; leave --dp-size ports "
                    "between endpoint and replay_endpoint"
                )


def _check_port(name: str, endpoint: str) -> None:
    """ZMQ would take the lowest 16 bits of any number."""
    port = endpoint.rpartition(":")[2]
    if port != "*" and not (port.isdecimal() and int(port[:9]) < 65536):
        rule = f"{name} must end in a port, at most 65535"
        raise ConfigError(f"{_FLAG}: {rule}, got {endpoint!r}")


def _endpoint_of(rank: int, endpoint: str, name: str) -> str:
    """Rank r's is r ports on, or has its number at the end where there are no ports."""
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    if not port.isdecimal() or int(port) + rank > 65535:
        raise ConfigError(f"{_FLAG}: {name} {endpoint!r} leaves no port for data-parallel {rank=}")
    return f"{address}:{int(port) + rank}"
