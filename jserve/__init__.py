"""The public Python API: `jserve.Engine`, the errors it raises, and the version.

Importing jserve is cheap: `Engine` is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jserve import errors

if TYPE_CHECKING:
    from jserve.engine.engine import Engine

__all__ = ["Engine", "__version__", "errors"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from jserve.engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'jserve' has no attribute {name!r}")
