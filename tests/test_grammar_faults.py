"""What fails or is slow for one request's grammar in the engine costs no other: loop, scheduler,
gate and templates are real, matchers and runner are scripted.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from fake_engine import ScriptedRunner, continuation, make_loop, make_scheduler

from jserve.engine import loop as loop_module
from jserve.engine.channel import ApiEnd
from jserve.engine.grammar_gate import GrammarGate
from jserve.engine.grammar_queue import GrammarQueue
from jserve.engine.local import local_ends
from jserve.engine.loop import Loop
from jserve.grammar import templates as templates_module
from jserve.grammar.backend import GrammarError
from jserve.grammar.masks import Masks
from jserve.grammar.templates import Templates
from jserve.types import Abort, CompiledSpec, Delta, Deltas, GrammarSpec, SamplingParams, Submit

PROMPT = [1, 2, 3]


class Panic(BaseException):
    """As PyO3's PanicException, no Exception."""


@dataclasses.dataclass
class Matcher:
    """Allows everything; what it is asked may raise: fork, fill, accept, forced."""

    faults: dict[str, BaseException]
    finished: bool = False

    def _do(self, name: str) -> None:
        if name in self.faults:
            raise self.faults[name]

    def fork(self) -> Matcher:
        self._do("fork")
        return self

    def fill(self, row: np.ndarray) -> None:
        row[:1] = 0
        self._do("fill")
        row[:] = -1

    def accept(self, token_id: int) -> bool:
        self._do("accept")
        return True

    def forced(self) -> bytes:
        self._do("forced")
        return b""


class Backend:
    """Loads each payload by `load`, and notes in which thread."""

    def __init__(self, load: Callable[[bytes], Any] = lambda payload: Matcher({})) -> None:
        self._load = load
        self.loads: list[tuple[bytes, int]] = []

    def load(self, payload: bytes) -> Any:
        self.loads.append((payload, threading.get_ident()))
        return self._load(payload)


@dataclasses.dataclass
class Rig:
    backend: Backend
    templates: Templates
    api: ApiEnd
    loop: Loop
    runner: ScriptedRunner
    scheduler: Any

    def submit(self, rid: str, count: int, grammar: CompiledSpec | None = None) -> None:
        sampling = SamplingParams(max_new_tokens=count, temperature=0.0)
        self.api.send(Submit(rid=rid, prompt_ids=PROMPT, sampling=sampling, grammar=grammar))

    def until_idle(self) -> dict[str, Delta]:
        """The last Delta of each request."""
        ended: dict[str, Delta] = {}
        deadline = time.monotonic() + 20
        queue = cast(Any, self.loop._channel)._queue
        while time.monotonic() < deadline:
            self.loop.tick()
            for message in self.api.drain():
                items = message.items if isinstance(message, Deltas) else []
                ended |= {delta.rid: delta for delta in items if delta.finish is not None}
            if not self.scheduler.has_work and not queue.waiting:
                return ended
        raise AssertionError(f"still open, ended are {list(ended)}")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(loop_module, "IDLE_WAIT", 0.005)
    opened = []

    def make(
        backend: Backend, jump: Any = lambda request, constraint: None, **settings: Any
    ) -> Rig:
        templates, scheduler = Templates(lambda: cast(Any, backend)), make_scheduler(1, **settings)
        opened.append(templates)
        api, end = local_ends()
        gate = GrammarGate(end, GrammarQueue(templates, lambda: False))
        runner, masks = ScriptedRunner(), Masks(templates, scheduler, jump)
        loop = make_loop(gate, runner, 1, scheduler=scheduler, masks=masks)
        return Rig(backend, templates, api, loop, runner, scheduler)

    yield make
    for templates in opened:
        templates.close()


def spec(text: str) -> CompiledSpec:
    return CompiledSpec(spec=GrammarSpec(kind="regex", text=text), payload=text.encode() * 8)


@pytest.mark.parametrize("error", [OverflowError("too far"), Panic("too far")])
@pytest.mark.parametrize("where", ["fork", "fill", "accept", "forced"])
def test_a_grammar_that_fails_in_a_step_ends_its_request_alone(
    make: Any, caplog: pytest.LogCaptureFixture, where: str, error: BaseException
) -> None:
    good = Matcher({})
    bad = Matcher({where: error})
    rig = make(
        Backend(lambda payload: bad if payload.startswith(b"bad") else good),
        jump=lambda request, constraint: constraint.matcher.forced(),
    )
    rig.submit("plain", 40)
    rig.submit("good", 40, spec("good"))
    for i in range(3):  # the second failure of a step would end the engine
        rig.submit(f"bad {i}", 40, spec("bad"))
    ended = rig.until_idle()
    right = continuation(PROMPT, 40)
    assert ended["plain"].token_ids == ended["good"].token_ids == right
    for i in range(3):
        delta = ended[f"bad {i}"]
        name = type(error).__name__
        assert delta.finish is not None and delta.finish.type == "abort"
        assert delta.finish.message == (
            f"The answer is incomplete: its grammar failed: {name}: too far."
        )
        assert delta.token_ids == right[: len(delta.token_ids)] and len(delta.token_ids) <= 2
    assert ("reset", -1) not in rig.runner.events
    assert rig.scheduler.stats()["grammar_failures_total/fault"] == 3
    assert sum("failed" in record.message for record in caplog.records) == 3


def test_a_limit_in_a_step_ends_its_request_with_its_name(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(Backend(lambda payload: Matcher({"fill": GrammarError("it has a pattern")})))
    rig.submit("plain", 20)
    rig.submit("bad", 20, spec("bad"))
    ended = rig.until_idle()
    assert ended["plain"].token_ids == continuation(PROMPT, 20)
    finish = ended["bad"].finish
    assert finish is not None and finish.type == "abort"
    assert finish.message == "The answer is incomplete: it has a pattern."
    assert rig.scheduler.stats()["grammar_failures_total/limit"] == 1
    assert not caplog.records  # nobody's fault


def test_what_fails_in_the_scheduler_is_not_taken_for_the_grammars_fault(make: Any) -> None:
    """The cache fails while a stay is being ended: its pages are unsure, and the step fails."""
    rig = make(Backend(lambda payload: Matcher({"accept": ValueError("no")})))
    finish = rig.scheduler.cache.finish

    def broken(*arguments: Any) -> None:
        rig.scheduler.cache.finish = finish
        raise RuntimeError("the cache is broken")

    rig.scheduler.cache.finish = broken
    rig.submit("bad", 9, spec("bad"))
    assert rig.until_idle()["bad"].finish is not None
    assert rig.runner.events.count(("reset", -1)) == 1


@pytest.mark.parametrize("distinct", [2, 30])
def test_no_step_loads_a_grammar_whose_request_had_to_queue(
    make: Any, monkeypatch: pytest.MonkeyPatch, distinct: int
) -> None:
    monkeypatch.setattr(templates_module, "_KEPT_BYTES", 10)  # room for one
    rig = make(Backend(), num_slots=1)
    for i in range(distinct):
        rig.submit(f"r{i}", 3, spec(f"{i:02d}"))
        rig.submit(f"again{i}", 3, spec(f"{i:02d}"))
    ended = rig.until_idle()
    assert len(ended) == 2 * distinct
    assert rig.scheduler.stats()["grammar_rows_masked_total"] >= 2 * distinct
    payloads = [payload for payload, _ in rig.backend.loads]
    assert len(payloads) == distinct == len(set(payloads))
    assert threading.get_ident() not in {thread for _, thread in rig.backend.loads}


def test_a_loaded_grammar_is_kept_for_who_has_it_and_no_longer(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates_module, "_KEPT_BYTES", 10)
    rig = make(Backend(), num_slots=1)
    for i in range(20):
        rig.submit(f"r{i}", 400 if i == 0 else 3, spec(f"{i:02d}"))
    held = rig.templates._held
    queue = cast(Any, rig.loop._channel)._queue
    while len(held) < 20 or queue.waiting:
        rig.loop.tick()
    rig.api.send(Abort(abort_all=True))
    rig.until_idle()
    for _ in range(3):  # the rows in flight and the sorted rows of the roster go
        rig.loop.tick()
    rig.scheduler.plan()
    gc.collect()
    assert len(held) == len(rig.templates._latest) == 1  # what is kept anyway
    assert rig.templates._num_bytes == 16


def test_requests_with_one_grammar_share_its_payload() -> None:
    templates = Templates(lambda: cast(Any, Backend()))
    one, same = spec("a"), spec("a")
    assert one is not same
    assert templates.share(one)[0] is templates.share(same)[0] is one
    templates.close()


def test_a_load_that_failed_is_tried_again() -> None:
    fails = [MemoryError("no room"), None]

    def load(payload: bytes) -> Any:
        error = fails.pop(0)
        if error is not None:
            raise error
        return "template"

    templates = Templates(lambda: cast(Any, Backend(load)))
    with pytest.raises(MemoryError):
        templates.load(spec("a")).result(10)
    assert cast(Any, templates.load(spec("a")).result(10)) == "template"
    assert cast(Any, templates.load(spec("a")).result(10)) == "template" and not fails
    templates.close()
