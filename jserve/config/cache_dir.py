"""Where compiled programs are kept: --compilation-cache-dir as a folder, or a reason why not."""

from __future__ import annotations

import os
from pathlib import Path

from jserve.config.options import ExecutionOptions
from jserve.errors import ConfigError


def compilation_cache(options: ExecutionOptions) -> str | None:
    """The folder, None for none. One that was named is made, and must be writable: ConfigError. At
    the usual place nothing may be kept, of which JAX warns."""
    name = options.compilation_cache_dir
    if name == "off":
        return None
    folder = Path(name).expanduser()
    if name != ExecutionOptions().compilation_cache_dir:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            problem = "" if os.access(folder, os.W_OK | os.X_OK) else "not writable"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            rule = "name another folder, or off"
            raise ConfigError(f"--compilation-cache-dir {name} cannot be used: {problem}; {rule}")
    return str(folder)
