"""What holds for every program of this process: the default backend, and SGLang's switches.

The one piece of state that is shared on purpose: SGLang's programs set it.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(slots=True)
class GlobalConfig:
    verbosity: int = 0  # no effect: failures are warnings, what was done is in `steps`
    default_backend: Any = None
    skip_special_tokens_in_output: bool = True
    spaces_between_special_tokens_in_out: bool = True
    enable_precache_with_tracing: bool = True  # a batch computes its common prefix once
    enable_parallel_encoding: bool = True  # no effect: branches are joined as text


global_config = GlobalConfig()
