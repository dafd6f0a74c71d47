"""Compiled programs on disk, so that the same engine's next start neither traces nor lowers them.

JAX's own compilation cache finds a program by what it was lowered to, and lowering is most of such
a start. Here its key and everything that its code depends on name it: the packages' source, what
the engine was built with, versions, device, XLA's flags. A file that cannot be read counts as none.
Knows nothing of what programs do.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jserve.runner.buckets import Key

logger = logging.getLogger("jserve.runner")

_PACKAGES = ("jserve", "pallas_kernels", "sharding")
_KEPT = 4  # builds, the latest used ones


class ProgramStore:
    """Programs of one build of the engine. Safe from several threads, and processes.

    Args:
        folder: of all builds; None keeps nothing.
        facts: what the programs depend on beside source, versions and device; told by their repr.
        devices: that the programs run on.
    """

    def __init__(
        self,
        folder: Path | None,
        facts: Iterable[object] = (),
        devices: Sequence[Any] = (),
    ) -> None:
        self._folder: Path | None = None
        self._devices = list(devices)
        if folder is None:
            return
        build = folder / _digest((*facts, devices))
        try:
            build.mkdir(parents=True, exist_ok=True)
            os.utime(build)
            _forget_old(folder)
            self._folder = build
        except OSError as error:
            logger.warning("compiled programs are not kept: %s", error)

    def holds(self, key: Key) -> bool:
        return self._folder is not None and self._path(self._folder, key).exists()

    def load(self, key: Key) -> jax.stages.Compiled | None:
        """None when there is none, or what is there cannot be used."""
        if self._folder is None:
            return None
        try:
            kept = pickle.loads(self._path(self._folder, key).read_bytes())
            return deserialize_and_load(*kept, execution_devices=self._devices)
        except Exception as error:  # a file of any content: the program is compiled then
            logger.warning("%s was kept but cannot be loaded: %s", key, error)
            return None

    def save(self, key: Key, compiled: jax.stages.Compiled) -> None:
        """Keep it; a program or a disk that does not allow that is no failure."""
        if self._folder is None:
            return
        try:
            content = pickle.dumps(serialize(compiled))
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(content)
            Path(file.name).replace(self._path(self._folder, key))
        except Exception as error:  # serving goes on without it
            logger.warning("%s is not kept: %s", key, error)

    def _path(self, folder: Path, key: Key) -> Path:
        return folder / "-".join(str(part) for part in key)


def _digest(facts: Iterable[object]) -> str:
    device, digest = jax.devices()[0], hashlib.sha256()
    about = (jax.__version__, version("jaxlib"), device.client.platform_version)
    about = (*about, device.device_kind, os.environ.get("XLA_FLAGS"))
    for fact in (*about, *facts):
        digest.update(repr(fact).encode() + b"\0")
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in () if spec is None else spec.submodule_search_locations or ():
            for path in sorted(Path(root).rglob("*")):
                if path.suffix in (".py", ".json"):
                    digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _forget_old(folder: Path) -> None:
    """Keep the builds that were used last; another engine may be removing them too."""
    with contextlib.suppress(OSError):
        builds = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for build in builds[_KEPT:]:
            shutil.rmtree(build, ignore_errors=True)
