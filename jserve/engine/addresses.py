"""Where an engine process finds its API process: sockets in a private directory."""

from __future__ import annotations

import dataclasses
import tempfile

from jserve.engine.channel import ApiEnd, EngineEnd
from jserve.engine.ipc import ZmqEnd
from jserve.types import FromEngine, ToEngine


@dataclasses.dataclass(frozen=True, slots=True)
class Addresses:
    """`directory` has mode 0700."""

    directory: str

    @classmethod
    def create(cls) -> Addresses:
        return cls(tempfile.mkdtemp(prefix="jserve-"))

    def api_end(self) -> ApiEnd:
        """Binds; its close removes the directory."""
        return ZmqEnd(FromEngine, self._url("to_api"), self._url("to_engine"), self.directory)

    def engine_end(self) -> EngineEnd:
        return ZmqEnd(ToEngine, self._url("to_engine"), self._url("to_api"))

    def _url(self, name: str) -> str:
        return f"ipc://{self.directory}/{name}"
