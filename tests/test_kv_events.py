"""KV events: what a subscriber rebuilds from them is what the tree holds, whatever happens to it;
and no subscriber or replay holds up the cache.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from test_cache_eviction import resolved
from test_engine_startup import FLAGS, SHAPE

from jserve.cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventRecorder,
    KvEvent,
)
from jserve.cache.manager import CacheManager, Lease
from jserve.cache.observer import NO_OBSERVER, Observer
from jserve.cache.radix import Namespace, RadixTree
from jserve.config import KvEventsOptions
from jserve.engine.engine import Engine
from jserve.engine.kv_events import END, KvEventPublisher, open_kv_events
from jserve.errors import ConfigError

NAMESPACES: list[Namespace] = [(None, None), ("lora", None), (None, "salt")]
DOC = Path(__file__).parents[1] / "docs" / "cache.md"


class Recording:
    """An observer that makes the events at once."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        recorder = EventRecorder(num_pages, page_size)
        self.events: list[KvEvent] = []
        self.held = 0
        add = self.events.append
        self.observer = Observer(
            stored=lambda *change: self.count(len(change[2]), add(recorder.stored(*change))),
            removed=lambda pages: self.count(-len(pages), add(recorder.removed(pages))),
            cleared=lambda: self.count(-self.held, add(recorder.cleared())),
            num_pages=lambda: self.held,
        )

    def count(self, more: int, _: None) -> None:
        self.held += more


class Subscriber:
    """The set of cached blocks as the events tell it, and the tokens up to each one's end."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.seen: Counter[str] = Counter()

    def take(self, events: list[KvEvent]) -> None:
        handlers: dict[type, Callable[[Any], None]] = {
            BlockStored: self.store,
            BlockRemoved: self.remove,
            AllBlocksCleared: lambda event: self.blocks.clear(),
        }
        for event in events:
            self.seen[type(event).__name__] += 1
            handlers[type(event)](event)

    def store(self, event: BlockStored) -> None:
        before: tuple[int, ...] = ()
        if event.parent_block_hash is not None:
            before = self.blocks[event.parent_block_hash]  # parents are stored first
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        for i, block in enumerate(event.block_hashes):
            assert block not in self.blocks
            self.blocks[block] = before + tuple(event.token_ids[: (i + 1) * size])

    def remove(self, event: BlockRemoved) -> None:
        for block in event.block_hashes:
            del self.blocks[block]


def blocks_of(tree: RadixTree) -> dict[int, tuple[int, ...]]:
    """From the tree alone: hash and tokens of every page, by the documented rule."""
    held: dict[int, tuple[int, ...]] = {}
    stack: list[tuple[Any, bytes, tuple[int, ...]]] = []
    for edge, child in tree.root.children.items():
        namespace = edge[0]
        seed = b""
        if namespace != (None, None):
            seed = hashlib.sha256(json.dumps(list(namespace)).encode()).digest()
        stack.append((child, seed, ()))
    while stack:
        node, digest, tokens = stack.pop()
        for page in node.key.reshape(-1, tree.page_size):
            digest = hashlib.sha256(digest + page.astype("<i4").tobytes()).digest()
            tokens += tuple(page.tolist())
            value = int(digest.hex()[:16], 16)
            held[value - (1 << 64 if value >= 1 << 63 else 0)] = tokens
        stack += [(child, digest, tokens) for child in node.children.values()]
    return held


def churn(
    manager: CacheManager, steps: int, seed: int, check: Callable[[], None] = lambda: None
) -> Counter[str]:
    """Random requests in a pool that holds a few of them; flush and reset now and then."""
    rng = np.random.default_rng(seed)
    leases: list[tuple[Lease, np.ndarray]] = []
    happened: Counter[str] = Counter()
    for _ in range(steps):
        draw = rng.random()
        if draw < 0.5:
            runs = rng.choice(3, size=int(rng.integers(1, 9)), p=[0.6, 0.3, 0.1])
            tokens = np.repeat(runs, manager.page_size).astype(np.int32)
            namespace = NAMESPACES[int(rng.integers(len(NAMESPACES)))]
            lease = manager.open(tokens, namespace, len(tokens) - 1)
            leases.append((lease, tokens))
            end = lease.num_pages
            while end < len(runs):  # chunks of two pages
                pages = manager.allocate(min(2, len(runs) - end))
                if pages is None:
                    break
                lease.extend(pages)
                end = lease.num_pages
                manager.commit(lease, tokens[: end * manager.page_size])
        elif draw < 0.96 and leases:
            lease, tokens = leases.pop(int(rng.integers(len(leases))))
            if rng.random() < 0.8:
                manager.finish(lease, tokens[: lease.num_pages * manager.page_size])
            else:
                manager.release(lease)
        elif draw < 0.97:
            manager.reset()
            leases.clear()
            happened["reset"] += 1
        elif draw > 0.985:
            while leases:
                manager.release(leases.pop()[0])
            manager.reset()
            happened["flush"] += 1
        check()
    for lease, _ in leases:
        manager.release(lease)
    return happened


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("policy", ["lru", "priority"])
def test_a_subscriber_rebuilds_what_the_tree_holds_after_every_operation(
    page_size: int, policy: str
):
    recording = Recording(24, page_size)
    subscriber = Subscriber()
    manager = CacheManager(24, page_size, eviction=policy, observer=recording.observer)

    def check() -> None:
        subscriber.take(recording.events)
        recording.events.clear()
        assert subscriber.blocks == blocks_of(manager.tree)
        manager.check_integrity()

    happened = churn(manager, 1500, page_size, check)
    check()
    assert min(happened["reset"], happened["flush"], manager.counters.evicted_pages) > 3
    assert min(subscriber.seen.values()) > 3 and len(subscriber.seen) == 3, subscriber.seen


def test_an_integrity_check_finds_an_observer_that_missed_something():
    recording = Recording(24, 1)
    manager = CacheManager(24, 1, observer=recording.observer)
    lease = manager.open(np.zeros(4, np.int32), (None, None), 3)
    lease.extend(manager.allocate(4))
    manager.finish(lease, np.zeros(4, np.int32))
    manager.check_integrity()
    recording.held -= 1
    with pytest.raises(AssertionError, match="told=3"):
        manager.check_integrity()


def test_events_have_the_shape_that_subscribers_of_others_know():
    stored = BlockStored([1], None, [5, 6], 2, medium="GPU", cache_salt="s")
    batch = EventBatch(1.5, [stored, BlockRemoved([1], "GPU"), AllBlocksCleared()], 0)
    wire = msgspec.msgpack.encode(batch)
    assert msgspec.msgpack.decode(wire) == [
        1.5,
        [
            ["BlockStored", [1], None, [5, 6], 2, None, None, "GPU", "s", None],
            ["BlockRemoved", [1], "GPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]
    assert msgspec.msgpack.decode(wire, type=EventBatch) == batch


@pytest.fixture
def endpoints(tmp_path: Path) -> dict[str, str]:
    return {
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def publisher(num_pages: int, page_size: int, **options: Any) -> KvEventPublisher:
    return KvEventPublisher(KvEventsOptions(publisher="zmq", **options), num_pages, page_size)


def replayed(context: zmq.Context[Any], endpoint: str, first: int) -> list[tuple[int, bytes]]:
    """Every batch that is kept, from `first` on."""
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    found = []
    while True:
        assert socket.poll(5000), "no replay"
        empty, number, payload = socket.recv_multipart()
        assert empty == b""
        if number == END:
            assert payload == b""
            socket.close(0)
            return found
        found.append((int.from_bytes(number, "big"), payload))


def listening(
    context: zmq.Context[Any], events: KvEventPublisher, endpoint: str, hwm: int = 1000
) -> zmq.Socket[Any]:
    """A subscriber that is connected, as a message has shown."""
    socket = context.socket(zmq.SUB)
    socket.set_hwm(hwm)
    socket.connect(endpoint)
    socket.subscribe("")
    deadline = time.monotonic() + 10
    while not socket.poll(20):
        assert time.monotonic() < deadline, "nothing was received"
        events.observer.cleared()
    return socket


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)


def test_live_messages_and_a_replay_tell_the_same(endpoints, context):
    events = publisher(64, 2, topic="kv@test", **endpoints)
    listener = listening(context, events, endpoints["endpoint"])
    manager = CacheManager(64, 2, observer=events.observer)
    churn(manager, 400, 0)
    wait_until(lambda: events._changes.empty())
    kept = replayed(context, endpoints["replay_endpoint"], 0)
    assert [number for number, _ in kept] == list(range(len(kept)))
    live = []
    while listener.poll(200):
        topic, number, payload = listener.recv_multipart()
        assert topic == b"kv@test"
        live.append((int.from_bytes(number, "big"), payload))
    assert live == kept[-len(live) :] and len(live) > 1
    later = kept[len(kept) // 2][0]
    assert replayed(context, endpoints["replay_endpoint"], later) == kept[later:]
    subscriber = Subscriber()
    last = 0.0
    for _, payload in kept:
        batch = msgspec.msgpack.decode(payload, type=EventBatch)
        assert batch.attn_dp_rank == 0 and batch.ts >= last
        last = batch.ts
        subscriber.take(batch.events)
    assert subscriber.blocks == blocks_of(manager.tree) and subscriber.blocks
    events.close()


def test_only_so_many_batches_are_kept_for_replay(endpoints, context):
    events = publisher(64, 1, buffer_steps=5, **endpoints)
    for _ in range(12):
        events.observer.cleared()
        wait_until(lambda: events._changes.empty())
        time.sleep(0.01)
    kept = [number for number, _ in replayed(context, endpoints["replay_endpoint"], 0)]
    assert len(kept) == 5 and kept == list(range(kept[0], kept[0] + 5)) and kept[0] > 0
    events.close()


def test_a_slow_subscriber_loses_messages_but_never_blocks_the_cache(endpoints, context):
    events = publisher(4000, 1, hwm=1, **endpoints)
    asleep = listening(context, events, endpoints["endpoint"], hwm=1)
    manager = CacheManager(4000, 1, observer=events.observer)
    started = time.monotonic()
    rng = np.random.default_rng(0)
    for _ in range(600):  # 2,000 pages a prompt: the kernel's buffers fill
        tokens = rng.integers(0, 9999, 2000).astype(np.int32)
        lease = manager.open(tokens, (None, None), 1999)
        lease.extend(manager.allocate(2000))
        manager.finish(lease, tokens)
    assert time.monotonic() - started < 30
    wait_until(lambda: events._changes.empty())
    total = replayed(context, endpoints["replay_endpoint"], 0)[-1][0] + 1
    received = 0
    while asleep.poll(200):
        asleep.recv_multipart()
        received += 1
    assert 0 < received < total, (received, total)
    events.close()


def test_hashing_that_cannot_keep_up_holds_nobody_up_and_nothing_false_is_told(
    endpoints, context, caplog
):
    events = publisher(64, 2, max_queue_size=200, buffer_steps=100_000, **endpoints)
    manager, subscriber = CacheManager(64, 2, observer=events.observer), Subscriber()
    stuck, go_on, told = threading.Event(), threading.Event(), 0

    def hash_slowly() -> None:
        stuck.set()
        assert go_on.wait(30)

    def follow() -> dict[int, tuple[int, ...]]:
        """What the events tell is cached by now."""
        nonlocal told
        wait_until(lambda: events._changes.empty())
        for number, payload in replayed(context, endpoints["replay_endpoint"], told):
            subscriber.take(msgspec.msgpack.decode(payload, type=EventBatch).events)
            told = number + 1
        return subscriber.blocks

    churn(manager, 100, seed=1)
    assert follow() == blocks_of(manager.tree)
    events._put(hash_slowly)
    assert stuck.wait(10)
    started = time.monotonic()
    churn(manager, 1000, seed=2)
    assert time.monotonic() - started < 10 and not go_on.is_set()
    assert events._changes.qsize() == 201
    assert "200 changes wait; the next are not published" in caplog.text
    go_on.set()

    shares = []
    for seed in range(3, 30):
        known, held = follow().items(), blocks_of(manager.tree).items()
        assert known <= held
        shares.append(len(known) / max(len(held), 1))
        churn(manager, 20, seed)
    assert shares[0] == 0 and max(shares) > 0  # what comes later is told again
    manager.reset()
    churn(manager, 20, seed=40)
    assert follow() == blocks_of(manager.tree) != {}
    events.close()


def test_a_publisher_that_broke_holds_nobody_up(endpoints, caplog):
    events = publisher(64, 1, max_queue_size=2, **endpoints)
    events.observer.removed(np.array([10**9], np.int32))  # no such page: nothing to encode
    events._put(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    wait_until(lambda: not events._thread.is_alive())
    assert "no more KV events" in caplog.text
    for _ in range(10):
        events.observer.cleared()
    events.close()


def test_the_last_events_leave_before_a_publisher_ends(endpoints, context):
    events = publisher(64, 1, **endpoints)
    listener = listening(context, events, endpoints["endpoint"])
    wait_until(lambda: events._changes.empty())
    while listener.poll(200):
        listener.recv_multipart()
    for _ in range(50):
        events.observer.cleared()
    events.close()
    count = 0
    while listener.poll(300):
        batch = msgspec.msgpack.decode(listener.recv_multipart()[2], type=EventBatch)
        count += len(batch.events)
    assert count == 50
    assert publisher(64, 1, **endpoints).close() is None  # the addresses are free again


def test_a_subscriber_written_as_documented_follows_the_cache(endpoints):
    source = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)[0]
    assert len(source.splitlines()) <= 26
    scope: dict[str, Any] = {}
    exec(compile(source, str(DOC), "exec"), scope)
    events = publisher(64, 2, **endpoints)
    manager = CacheManager(64, 2, observer=events.observer)
    blocks: set[int] = set()
    goal: list[set[int]] = []
    follower = threading.Thread(
        target=scope["follow"],
        args=(*endpoints.values(), blocks, lambda found: bool(goal) and found == goal[0]),
        daemon=True,
    )
    churn(manager, 200, 3)  # before anybody listens
    follower.start()
    churn(manager, 400, 4)
    goal.append(set(blocks_of(manager.tree)))
    assert goal[0]
    follower.join(20)
    assert not follower.is_alive(), f"{len(blocks)} blocks, {len(goal[0])} wanted"
    events.close()


def test_without_events_nothing_is_made_and_it_costs_next_to_nothing():
    observer, close = open_kv_events(None, 100, 16)
    assert observer is NO_OBSERVER and observer.num_pages() is None
    close()
    tokens = np.zeros(32_768, np.int32)
    best = 9.0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(1000):
            observer.stored(tokens[-1:], tokens, tokens, (None, None))
        best = min(best, (time.perf_counter() - start) / 1000)
    print(f"no observer: {best * 1e9:.0f} ns a change")
    assert best < 2e-6


def test_with_events_the_engines_thread_only_queues(endpoints):
    """… and hashing takes about a microsecond a page, elsewhere."""
    events = publisher(50_000, 1, **endpoints)
    tokens = np.arange(32_768, dtype=np.int32)
    start = time.perf_counter()
    events.observer.stored(tokens[:0], tokens, tokens, (None, None))
    queued = time.perf_counter() - start
    recorder = EventRecorder(50_000, 1)
    start = time.perf_counter()
    recorder.stored(tokens[:0], tokens, tokens, (None, None))
    hashed = time.perf_counter() - start
    print(f"32k pages: queued in {queued * 1e6:.1f} us, hashed in {hashed * 1e3:.1f} ms")
    assert queued < 1e-3 and events.observer.num_pages() == 32_768
    events.close()


@pytest.mark.full
def test_an_engine_publishes_says_so_and_leaves_the_addresses_free(endpoints, context, tmp_path):
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(SHAPE))
    flags = {
        **FLAGS,
        "kv_events_config": json.dumps({"publisher": "zmq", **endpoints}),
        "radix_eviction_policy": "slru",
        "radix_eviction_policy_config": '{"protected_threshold": 3}',
    }
    with Engine(str(shape), inline=True, **flags) as engine:
        info = engine.get_server_info()
        assert info["kv_events"]["publisher"] == "zmq"
        assert info["kv_events"]["endpoint"] == endpoints["endpoint"]
        assert (info["eviction"], info["protected_threshold"]) == ("slru", 3)
        prompt = list(range(5, 25))
        params = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
        output = engine.generate(input_ids=prompt, sampling_params=params)["output_ids"]

        def follow() -> set[tuple[int, ...]]:
            subscriber = Subscriber()
            for _, payload in replayed(context, endpoints["replay_endpoint"], 0):
                batch = msgspec.msgpack.decode(payload, type=EventBatch)
                subscriber.take(batch.events)
            return set(subscriber.blocks.values())

        whole = tuple(prompt + output)
        wait_until(lambda: follow() == {whole[:end] for end in range(4, 25, 4)})
        assert engine.flush_cache(timeout=5)
        wait_until(lambda: not follow())
    publisher(8, 1, **endpoints).close()


def test_the_settings_are_json_and_null_is_none():
    assert resolved().kv_events is None
    assert resolved(kv_events_config='{"publisher": "null"}').kv_events is None
    options = resolved(kv_events_config='{"publisher": "zmq", "hwm": 7, "topic": "kv"}').kv_events
    assert options == KvEventsOptions(publisher="zmq", hwm=7, topic="kv")
    assert options.endpoint == "tcp://*:5557" and options.buffer_steps == 10_000


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("zmq", "is not JSON"),
        ('"zmq"', "must be a JSON object"),
        ('{"publisher": "kafka"}', "must be null or zmq"),
        ('{"publishers": "zmq"}', "did you mean publisher"),
        ('{"publisher": "zmq", "hwm": 0}', "hwm must be >= 1"),
        ('{"publisher": "zmq", "hwm": 1.5}', "hwm must be int"),
        ('{"publisher": "zmq", "endpoint": "5557"}', "endpoint must be like"),
        ('{"publisher": "zmq", "replay_endpoint": 5558}', "replay_endpoint must be str"),
        ('{"publisher": "zmq", "endpoint": "tcp://*:99999"}', "must end in a port, at most 65535"),
        (
            '{"publisher": "zmq", "replay_endpoint": "tcp://*"}',
            "replay_endpoint must end in a port",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_in_words(config: str, words: str):
    with pytest.raises(ConfigError, match=words) as error:
        resolved(kv_events_config=config)
    assert "--kv-events-config" in str(error.value)


def test_events_of_a_cache_that_is_off_are_refused():
    with pytest.raises(ConfigError, match="--disable-radix-cache"):
        resolved(kv_events_config='{"publisher": "zmq"}', disable_radix_cache=True)


def test_an_address_in_use_is_a_config_error(endpoints):
    context = zmq.Context()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    try:
        for options in (
            {"endpoint": f"tcp://*:{port}"},
            {"endpoint": endpoints["endpoint"], "replay_endpoint": f"tcp://127.0.0.1:{port}"},
        ):
            with pytest.raises(ConfigError, match=str(port)):
                publisher(8, 1, **options)
    finally:
        context.destroy(linger=0)


def test_a_batch_says_whose_cache_it_tells_of(endpoints, context):
    events = publisher(64, 2, rank=3, **endpoints)
    events.observer.cleared()
    wait_until(lambda: bool(replayed(context, endpoints["replay_endpoint"], 0)))
    (_, payload), *_ = replayed(context, endpoints["replay_endpoint"], 0)
    assert msgspec.msgpack.decode(payload, type=EventBatch).attn_dp_rank == 3
    events.close()
