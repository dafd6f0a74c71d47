"""Options of the engine and the server.

options.py → tree.py: Config ← arguments.py
             together.py: Config → ok; resolve.py: Config, model, devices → Resolved
"""

from jserve.config.arguments import add_arguments
from jserve.config.kv_events import KvEventsOptions
from jserve.config.options import (
    CacheOptions,
    ExecutionOptions,
    GrammarOptions,
    ModelOptions,
    SchedulerOptions,
    ServerOptions,
)
from jserve.config.replica import Replica, num_replicas, too_few_devices
from jserve.config.resolve import DeviceFacts, Resolved, resolve
from jserve.config.together import check_together
from jserve.config.tree import Config, unknown_option

__all__ = [
    "CacheOptions",
    "Config",
    "DeviceFacts",
    "ExecutionOptions",
    "GrammarOptions",
    "KvEventsOptions",
    "ModelOptions",
    "Replica",
    "Resolved",
    "SchedulerOptions",
    "ServerOptions",
    "add_arguments",
    "check_together",
    "num_replicas",
    "resolve",
    "too_few_devices",
    "unknown_option",
]
