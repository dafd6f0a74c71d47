"""The environment of every test: set before jax is imported, inherited by what tests start.

CPU with 8 fake devices; one torch thread (two are slower than one on small machines); rank
promotion raises; libtpu compiles for TPUs that are not there, in several processes at once.
Behind it fixtures that several files use.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

_DEFAULTS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

assert "jax" not in sys.modules, "jax was imported before its environment was set"
for _name, _value in _DEFAULTS.items():
    os.environ.setdefault(_name, _value)
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()


@pytest.fixture
def sent(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What goes to the module's `engine` from here on."""
    messages: list[Any] = []
    send = engine._client.send
    monkeypatch.setattr(engine._client, "send", lambda m: (messages.append(m), send(m)))
    return messages
