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
    max_queue_size: int = 100_000  # changes that wait to be published; beyond, a batch is lost
    topic: str = ""


def kv_events_options(text: str | None) -> KvEventsOptions | None:
    """None: no events are wanted. Raises ConfigError."""
    names = {field.name: field.default for field in dataclasses.fields(KvEventsOptions)}
    options = KvEventsOptions(**read_object(_FLAG, text, names))
    if options.publisher not in ("null", "zmq"):
        raise ConfigError(f"{_FLAG}: publisher must be null or zmq, got {options.publisher!r}")
    endpoints = {"endpoint": options.endpoint, "replay_endpoint": options.replay_endpoint}
    for name, value in endpoints.items():
        if value is not None and "://" not in value:
            example = "tcp://*:5557 or ipc://events.sock"
            raise ConfigError(f"{_FLAG}: {name} must be like {example}, got {value!r}")
    return options if options.publisher == "zmq" else None
