"""Which devices a data-parallel rank claims before its backend starts, and what is refused."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax
import pytest

from jserve.config import Config, KvEventsOptions, Replica, check_together
from jserve.config.kv_events import kv_events_options
from jserve.engine import devices
from jserve.errors import ConfigError


def config(rank: int = 0, alone: bool = True, **flags: int) -> Config:
    made = Config.from_flags(model_path="m", **flags)
    return dataclasses.replace(made, replica=Replica(rank, alone))


@pytest.mark.parametrize(
    ("given", "rank", "flags", "seen"),
    [
        (None, 0, {"dp_size": 4}, "0"),
        (None, 3, {"dp_size": 4}, "3"),
        (None, 1, {"dp_size": 2, "tp_size": 2}, "2,3"),
        ("5,GPU-ab,7,2", 1, {"dp_size": 2, "ep_size": 2}, "7,2"),
        ("5,GPU-ab,7,2", 1, {"dp_size": 3}, "GPU-ab"),
    ],
)
def test_a_rank_sees_its_own_of_the_gpus_that_the_user_left(
    monkeypatch: pytest.MonkeyPatch, given: str | None, rank: int, flags: dict, seen: str
) -> None:
    monkeypatch.setattr(devices, "_num_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    devices._claim_gpus(config(rank, **flags))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_more_gpus_than_there_are_is_refused_with_what_would_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "_num_gpus", lambda: 4)
    message = "--dp-size 3 times --tp-size 2 takes 6 devices, over the 4 found of --device gpu; "
    with pytest.raises(ConfigError, match=f"{message}--dp-size 2 is the most"):
        devices._claim_gpus(config(dp_size=3, tp_size=2))
    with pytest.raises(ConfigError, match="over the 4 found of --device gpu; not even one has ro"):
        devices._claim_gpus(config(dp_size=2, tp_size=8))
    monkeypatch.setattr(devices, "_num_gpus", lambda: 0)
    monkeypatch.setattr(os, "environ", {})
    devices._claim_gpus(config(dp_size=2))
    assert not os.environ, "no driver, no GPUs: nothing to claim"


DRIVER = """
import os
from pathlib import Path

class c_int:
    def __init__(self, value):
        self.value = value

class CDLL:
    def __init__(self, name):
        assert name == "libcuda.so.1" and os.getppid() == {parent}

    def cuInit(self, flags):
        return {broken}

    def cuDeviceGetCount(self, count):
        count.value = 3
        return 0

def byref(count):
    return count
"""


@pytest.mark.parametrize(("text", "count"), [(DRIVER, 3), (DRIVER, 0), ("CDLL = None", 0)])
def test_the_driver_is_asked_in_another_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, count: int
) -> None:
    text = text.replace("{parent}", str(os.getpid())).replace("{broken}", str(int(not count)))
    (tmp_path / "ctypes.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert devices._num_gpus() == count


@pytest.mark.parametrize(
    ("given", "rank", "flags", "chips", "bounds"),
    [
        (None, 1, {"dp_size": 4}, "1", "1,1,1"),
        (None, 1, {"dp_size": 2, "tp_size": 2}, "2,3", "1,2,1"),
        ("4,5,6,7", 1, {"dp_size": 2, "tp_size": 2}, "6,7", "1,2,1"),
    ],
)
def test_a_rank_on_a_tpu_host_has_a_process_of_its_own_chips(
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    rank: int,
    flags: dict,
    chips: str,
    bounds: str,
) -> None:
    monkeypatch.setattr(devices, "_num_chips", lambda: 4)
    monkeypatch.setattr(os, "environ", {} if given is None else {"TPU_VISIBLE_CHIPS": given})
    devices._claim_chips(config(rank, **flags))
    assert os.environ == {
        "TPU_VISIBLE_CHIPS": chips,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def test_tpu_chips_that_make_no_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(devices, "_num_chips", lambda: 8)
    with pytest.raises(ConfigError, match="takes 1, 2, 4, 8 TPU chips, not the 3 of --tp-size 3"):
        devices._claim_chips(config(dp_size=2, tp_size=3))
    with pytest.raises(ConfigError, match="--dp-size 8 is the most"):
        devices._claim_chips(config(dp_size=9))


def test_ranks_of_one_process_share_its_devices_out() -> None:
    found = jax.devices()
    for rank in range(4):
        own = devices.own_devices(config(rank, alone=False, dp_size=4, tp_size=2))
        assert own == found[2 * rank : 2 * rank + 2]
    with pytest.raises(
        ConfigError, match=f"over the {len(found)} found .* --dp-size 2 is the most"
    ):
        devices.own_devices(config(alone=False, dp_size=3, tp_size=4))
    assert devices.own_devices(config()) == found
    assert devices.num_found(config(alone=False, dp_size=4)) == len(found)
    assert devices.num_found(config(dp_size=4)) == 4 * len(found), "each process has its own"


EVENTS = '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "ipc://replay"}'


def test_each_rank_tells_of_its_cache_at_a_port_of_its_own() -> None:
    first, third = kv_events_options(EVENTS), kv_events_options(EVENTS, 2)
    assert first == KvEventsOptions(
        publisher="zmq", endpoint="tcp://*:5557", replay_endpoint="ipc://replay"
    )
    assert third is not None and third.rank == 2
    assert (third.endpoint, third.replay_endpoint) == ("tcp://*:5559", "ipc://replay_dp2")
    near = EVENTS.replace("ipc://replay", "tcp://*:5558")
    check_together(Config.from_flags(model_path="m", kv_events_config=near))
    message = "5558 is the replay_endpoint of data-parallel rank 0 and the endpoint of"
    with pytest.raises(ConfigError, match=message):
        check_together(Config.from_flags(model_path="m", kv_events_config=near, dp_size=2))
    high = '{"publisher": "zmq", "endpoint": "tcp://*:65534"}'
    assert kv_events_options(high, 1) is not None
    with pytest.raises(ConfigError, match="leaves no port for data-parallel rank=2"):
        check_together(Config.from_flags(model_path="m", kv_events_config=high, dp_size=3))


@pytest.mark.parametrize(
    ("error", "why"),
    [(AssertionError(), "there is none"), (RuntimeError("no\ncard"), "here: no card")],
)
def test_a_device_that_does_not_start_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    named = Config.from_flags(model_path="m", device="gpu")
    with pytest.raises(ConfigError, match=f"--device gpu cannot be used .*{why}"):
        devices.own_devices(named)
