"""How many steps of a long prompt are on the device at a time, and what hangs on it: when an abort
and a pause take effect, what is logged. All chunks but the last sample nothing.

Scheduler, loop and runner are real, of one device and of two ranks. The device is not: a step of it
has run when somebody waits for what it leaves, and no sooner.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import numpy as np
import pytest
from fake_engine import CONTEXT, PAGE, make_loop, make_scheduler
from fake_model import FakeModel

from jserve.batch import Hidden
from jserve.engine.local import local_ends
from jserve.engine.loop import Loop
from jserve.engine.placement import Placement
from jserve.engine.stacked_loop import StackedLoop
from jserve.engine.stacked_rank import RankParts
from jserve.metrics.step_clock import step_timing
from jserve.runner.buckets import Buckets, Key
from jserve.runner.guard import CompileGuard
from jserve.runner.programs import Programs
from jserve.runner.runner import Runner
from jserve.runner.shapes import Shapes
from jserve.runner.stacked import StackedRunner
from jserve.types import Abort, Control, ControlReply, Delta, Deltas, SamplingParams, Submit
from sharding.mesh import make_mesh
from sharding.ranks import Ranks, over_ranks
from sharding.rules import TP, Rules

SLOTS, CHUNK, TOKEN = 4, 16, 97
PROMPT = [3] * (CHUNK * 30)


class Device:
    """Its programs, as a manifest's; all tokens are TOKEN. A step takes `seconds`."""

    total = 1

    def __init__(self, seconds: float = 0.0) -> None:
        self.ready, self.seconds = self, seconds
        self.launched = self.done = self.most = 0  # forwards; most at a time that were not done
        self._programs: dict[str, Callable[..., Any]] = {
            "init": lambda: ("kv", "state"),
            "edit": lambda state, packed: state,
            "forward": self._forward,
            "head": self._head,
        }

    def __contains__(self, key: Key) -> bool:
        return True

    def __getitem__(self, key: Key) -> Callable[..., Any]:
        return self._programs[key.name]

    def __len__(self) -> int:
        return self.total

    def cancel(self) -> None: ...

    def wait(self, step: int) -> None:
        time.sleep(self.seconds * max(0, step - self.done))
        self.done = max(self.done, step)

    def _forward(self, params: Any, kv: Any, state: Any, packed: np.ndarray) -> tuple[Any, ...]:
        self.launched += 1
        self.most = max(self.most, self.launched - self.done)
        rows = cast(Any, Later(self, self.launched, (*packed.shape[:-1], SLOTS)))
        return kv, state, Hidden(rows, rows, rows, rows)

    def _head(self, params: Any, state: Any, rows: Any, slots: Any, index: Any, mask: Any) -> Any:
        return state, Later(self, rows.step, mask.shape[:-1])


class Later:
    """An array that `step` leaves."""

    def __init__(self, device: Device, step: int, shape: tuple[int, ...]) -> None:
        self.step, self._device, self._shape = step, device, shape

    def copy_to_host_async(self) -> None: ...

    def block_until_ready(self) -> Later:
        self._device.wait(self.step)
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self._device.wait(self.step)
        return np.full(self._shape, TOKEN, np.int32)


@functools.cache
def programs(ranks: int) -> Programs:
    mesh = make_mesh(jax.devices(), data=ranks)
    stacked = {"ranks": Ranks(mesh)} if ranks > 1 else {}
    rules = Rules(mesh, over_ranks(TP) if ranks > 1 else TP, **stacked)
    shapes = Shapes(
        FakeModel(),
        rules,
        num_slots=SLOTS,
        num_pages=400,
        page_size=PAGE,
        context_length=CONTEXT,
        kv_dtype="float32",
    )
    return Programs(shapes, Buckets.of(SLOTS, CHUNK))


class Rig:
    """A loop of one device or of two ranks, ticked by hand; requests go to the first."""

    def __init__(self, ranks: int, depth: int, seconds: float = 0.0) -> None:
        self.device, (self.api, end) = Device(seconds), local_ends()
        sizes = {"num_slots": SLOTS, "chunked_prefill_size": CHUNK, "vocab_size": 128}
        schedulers = [make_scheduler(depth, timing=step_timing(), **sizes) for _ in range(ranks)]
        self.scheduler = schedulers[0]
        kind = Runner if ranks == 1 else StackedRunner
        made = (programs(ranks), {"scale": 1, "head": 1}, self.device, CompileGuard("error"), 400)
        self.runner: Any = kind(*cast(Any, made))
        self.loop: Loop | StackedLoop
        if ranks == 1:
            self.loop = make_loop(end, self.runner, depth, scheduler=self.scheduler)
        else:
            measured = (self.runner, *self.runner.others)
            parts = [
                RankParts(i, schedulers[i], lambda plan: None, measured[i], {})
                for i in range(ranks)
            ]
            place = Placement(ranks, PAGE)
            self.loop = StackedLoop(parts, self.runner, end, place, depth=depth, page_size=PAGE)
        self.deltas: list[Delta] = []
        self.replies: list[ControlReply] = []

    def submit(self, rid: str, prompt: list[int], count: int = 2) -> None:
        sampling = SamplingParams(max_new_tokens=count, temperature=0.0)
        self.api.send(Submit(rid=rid, prompt_ids=prompt, sampling=sampling))

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.tick()
            for message in self.api.drain():
                if isinstance(message, Deltas):
                    self.deltas += message.items
                elif isinstance(message, ControlReply):
                    self.replies.append(message)

    def run(self, rid: str) -> Delta:
        """Until its end."""
        for _ in range(200):
            self.tick()
            ends = [d for d in self.deltas if d.rid == rid and d.finish is not None]
            if ends:
                return ends[-1]
        raise AssertionError(f"{rid} goes on: {self.scheduler.stats()}")


Make = Callable[..., Rig]


@pytest.fixture(params=[1, 2], ids=["one", "ranks"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    rigs: list[Rig] = []
    for loop in ("loop", "stacked_loop"):
        monkeypatch.setattr(f"jserve.engine.{loop}.IDLE_WAIT", 0.0)

    def made(depth: int = 1, seconds: float = 0.0) -> Rig:
        rigs.append(Rig(request.param, depth, seconds))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.runner.close()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_of_a_prompt_of_many_chunks_no_more_steps_are_on_the_device_than_of_decode(
    make: Make, depth: int
) -> None:
    prompt_of = make(depth)
    prompt_of.submit("a", PROMPT)
    assert prompt_of.run("a").token_ids[-1] == TOKEN
    assert prompt_of.device.launched >= 30, "a step a chunk"
    decode = make(depth)
    decode.submit("a", [1, 2], 30)
    decode.run("a")
    assert prompt_of.device.most == decode.device.most == depth + 1


def test_a_prompt_that_samples_nothing_at_all_ends_when_it_is_computed(make: Make) -> None:
    rig = make()
    rig.submit("a", PROMPT, 0)
    end = rig.run("a")
    assert end.finish is not None and end.finish.type == "length"
    assert rig.device.done == rig.device.launched == 30


def test_an_abort_amid_a_long_prompt_ends_it_with_the_steps_in_flight(make: Make) -> None:
    rig = make()
    rig.submit("a", PROMPT)
    rig.tick(9)
    assert (rig.device.launched, rig.device.done) == (9, 8)
    rig.api.send(Abort(rid="a"))
    rig.submit("b", [1] * CHUNK, 1)
    end = rig.run("a")
    assert end.finish is not None and end.finish.type == "abort"
    rig.run("b")
    assert rig.device.launched == 10, "b's, behind the one that was in flight"


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_amid_a_long_prompt_waits_for_the_steps_in_flight(make: Make, mode: str) -> None:
    rig = make()
    rig.submit("a", PROMPT)
    rig.tick(9)
    rig.api.send(Control(id="1", op="pause_generation", args={"mode": mode}))
    rig.tick()
    assert [reply.ok for reply in rig.replies] == [True]
    assert rig.device.done == rig.device.launched == 9, "nothing is in flight"
    rig.api.send(Control(id="2", op="continue_generation"))
    end = rig.run("a")
    assert end.finish is not None and end.finish.type == ("abort" if mode == "abort" else "length")


def test_throughput_and_times_of_chunks_are_those_of_their_steps(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Each step takes 10 ms, more on a busy machine."""
    caplog.set_level(logging.INFO, "jserve.engine")
    rig = make(seconds=0.01)
    started = time.monotonic()
    rig.submit("a", PROMPT)
    rig.run("a")
    rig.tick(2)
    took = time.monotonic() - started
    lines = [one for one in caplog.messages if "Prefill batch" in one]
    rates = [float(re.findall(r"throughput \(token/s\): ([\d.]+)", one)[0]) for one in lines]
    assert len(rates) == 30 and max(rates) <= CHUNK / 0.01, rates
    assert sum(CHUNK / rate for rate in rates) == pytest.approx(took, rel=0.2)
    timing = rig.scheduler.cache.counters.timing.numbers()
    steps = timing["execution_step_seconds"]
    assert sum(steps[:-1]) == rig.device.launched >= 31
    assert 0.01 * rig.device.launched <= steps[-1] <= took
