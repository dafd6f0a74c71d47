"""Options of the engine and the server.

options.py → tree.py: Config ← arguments.py
             resolve.py: Config, model, devices → Resolved
"""

from jserve.config.arguments import add_arguments
from jserve.config.kv_events import KvEventsOptions
from jserve.config.options import (
    CacheOptions,
    ExecutionOptions,
    ModelOptions,
    SchedulerOptions,
    ServerOptions,
)
from jserve.config.resolve import DeviceFacts, Resolved, resolve
from jserve.config.tree import Config, unknown_option

__all__ = [
    "CacheOptions",
    "Config",
    "DeviceFacts",
    "ExecutionOptions",
    "KvEventsOptions",
    "ModelOptions",
    "Resolved",
    "SchedulerOptions",
    "ServerOptions",
    "add_arguments",
    "resolve",
    "unknown_option",
]
