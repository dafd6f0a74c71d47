"""The devices of an engine: what must be set before its JAX backend starts, and which it takes.

One engine takes the first devices that it finds. Of several (--dp-size), rank r takes the r-th
group of tp x ep: in a process of its own it sees no others, in a shared one they are dealt out.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from jserve.config import Config, num_replicas, too_few_devices
from jserve.errors import ConfigError

_XLA_MEM_FRACTION = "0.93"  # of a GPU; the rest is for CUDA contexts, graphs and libraries
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
#: How libtpu wants the chips of one process among several on a host to lie.
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
_COUNT_GPUS = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
print(0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value)
"""


def claim_devices(config: Config) -> None:
    """Set what JAX reads once, when its backend starts; where it runs already, without effect.

    Raises ConfigError when the devices of this machine do not suffice for every rank.
    """
    execution = config.execution
    if execution.device != "auto":
        jax.config.update("jax_platforms", _PLATFORMS[execution.device])
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _XLA_MEM_FRACTION)
    flags = os.environ.get("XLA_FLAGS", "")
    shared = 1 if config.replica.alone else num_replicas(execution)
    num_devices = execution.tp_size * execution.ep_size * shared
    if num_devices > 1 and "host_platform_device_count" not in flags:
        flag = f"--xla_force_host_platform_device_count={num_devices}"
        os.environ["XLA_FLAGS"] = f"{flags} {flag}"  # of the CPU platform only
    platforms = jax.config.jax_platforms or "cuda,tpu"  # pyright: ignore[reportAttributeAccessIssue]
    if num_replicas(execution) > 1 and config.replica.alone:
        if "cuda" in platforms or "gpu" in platforms:
            _claim_gpus(config)
        if "tpu" in platforms:
            _claim_chips(config)


def own_devices(config: Config) -> list[Any]:
    """Starts the backend. All that there are, or this rank's share of them."""
    devices = _started(config.execution.device)
    if config.replica.alone:
        return devices
    if problem := too_few_devices(config.execution, len(devices), devices[0].platform):
        raise ConfigError(problem)
    return [devices[i] for i in _places(config)]


def num_found(config: Config) -> int:
    """Devices for all ranks. Of one that is alone in its process the others see as many."""
    others = num_replicas(config.execution) if config.replica.alone else 1
    return len(jax.devices()) * others


def _started(name: str) -> list[Any]:
    """Raises ConfigError when this machine has no such device, its driver fails, or JAX runs on
    another in this process."""
    try:
        devices = jax.devices()
    except (AssertionError, RuntimeError) as error:  # an assertion where nothing is said
        why = " ".join(str(error).split()) or "there is none, or its plugin is not installed"
        raise ConfigError(f"--device {name} cannot be used here: {why}") from error
    if name not in ("auto", found := devices[0].platform):
        jax.config.update("jax_platforms", _PLATFORMS.get(found, found))  # what it was, in effect
        why = f"JAX runs on {found} in this process already; ask before its first use, or for auto"
        raise ConfigError(f"--device {name} cannot be used here: {why}")
    return devices


def _places(config: Config) -> range:
    """Of this rank's devices among those of all."""
    each = config.execution.tp_size * config.execution.ep_size
    return range(config.replica.rank * each, (config.replica.rank + 1) * each)


def _claim_gpus(config: Config) -> None:
    """Leave visible, of the GPUs that the user left, this rank's. (jax_cuda_visible_devices would
    keep their numbers, which JAX 0.11 then finds out of range.)"""
    if not (found := _num_gpus()):
        return
    if problem := too_few_devices(config.execution, found, "gpu"):
        raise ConfigError(problem)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(found)] if given is None else given.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in _places(config))


def _num_gpus() -> int:
    """As the driver counts them. In another process: here it would keep to what is visible now."""
    count = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True)
    return int(count.stdout) if count.returncode == 0 else 0


def _claim_chips(config: Config) -> None:
    """libtpu takes the chips that the environment names, and lets others load it beside."""
    given = os.environ.get("TPU_VISIBLE_CHIPS")
    chips = given.split(",") if given else [str(i) for i in range(_num_chips())]
    if not chips:
        return
    if problem := too_few_devices(config.execution, len(chips), "tpu"):
        raise ConfigError(problem)
    places, sizes = _places(config), ", ".join(map(str, _TPU_BOUNDS))
    if len(places) not in _TPU_BOUNDS:
        raise ConfigError(
            f"each rank of --dp-size takes {sizes} TPU chips, not the {len(places)} of "
            f"--tp-size {config.execution.tp_size} times --ep-size {config.execution.ep_size}"
        )
    os.environ["TPU_VISIBLE_CHIPS"] = ",".join(chips[i] for i in places)
    os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] = _TPU_BOUNDS[len(places)]
    os.environ["TPU_PROCESS_BOUNDS"] = "1,1,1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"


def _num_chips() -> int:
    """TPU chips that this host has device files of, and libtpu for."""
    if importlib.util.find_spec("libtpu") is None:
        return 0
    names = [path.name for folder in ("/dev", "/dev/vfio") for path in Path(folder).glob("*")]
    return sum(re.fullmatch(r"accel\d+|\d+", name) is not None for name in names)
