"""The ZMQ channel between the two processes."""

from __future__ import annotations

import gc
import threading

from jserve.engine.addresses import Addresses
from jserve.types import Abort, Progress


def test_messages_cross_both_ways_in_order() -> None:
    addresses = Addresses.create()
    api, engine = addresses.api_end(), addresses.engine_end()
    for i in range(50):
        api.send(Abort(rid=str(i)))
        engine.send(Progress(stage="compile", done=i, total=50))
    got: list[Abort] = []
    seen: list[Progress] = []
    while len(got) < 50 or len(seen) < 50:
        engine.wait(1.0)
        got += engine.drain()
        api.wait(1.0)
        seen += api.drain()
    assert [m.rid for m in got] == [str(i) for i in range(50)]
    assert [m.done for m in seen] == list(range(50))
    engine.close()
    api.close()


def test_a_message_that_cannot_be_read_is_dropped_and_logged_and_the_others_arrive(caplog) -> None:
    addresses = Addresses.create()
    api, engine = addresses.api_end(), addresses.engine_end()
    for rid in ("first", 5, ["a"], "last"):
        api.send(Abort(rid=rid))  # type: ignore[arg-type]
    got: list[Abort] = []
    while not got or got[-1].rid != "last":
        engine.wait(5.0)
        got += engine.drain()
    assert [message.rid for message in got] == ["first", "last"]
    assert caplog.text.count("a message was dropped") == 2 and "`str`, got `int`" in caplog.text
    engine.close()
    api.close()


def test_an_end_that_nobody_closed_is_collected_at_once_with_messages_undelivered() -> None:
    def leave_open() -> None:
        addresses = Addresses.create()
        end = addresses.engine_end()  # connects to nobody
        end.send(Progress(stage="failed", message="x" * 1000))
        del end
        gc.collect()

    worker = threading.Thread(target=leave_open, daemon=True)
    worker.start()
    worker.join(5.0)
    assert not worker.is_alive(), "collecting the end waits for its messages to be delivered"
