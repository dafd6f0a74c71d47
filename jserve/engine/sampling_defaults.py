"""What a model's generation_config.json says of sampling: the defaults of chat requests.

Owns which of its keys count. Their types and ranges are those of a request's own fields.
"""

from __future__ import annotations

from jserve.engine.ranges import INT32_MAX, check_ranges
from jserve.engine.sampling_params import sampling_from_dict
from jserve.errors import ConfigError, RequestError
from jserve.weights.checkpoint import Checkpoint

_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, float]:
    """Those that the file sets, as a request would. Raises ConfigError that names file and key."""
    file = checkpoint.path / "generation_config.json"
    stated = checkpoint.generation_config
    given = {name: stated[name] for name in _KEYS if stated.get(name) is not None}
    if given.get("top_k") == 0:  # "all", as the file writes it
        given["top_k"] = -1
    try:
        check_ranges(sampling_from_dict(given), INT32_MAX)
    except RequestError as error:
        raise ConfigError(f"{file}: {error} Mend the file, or leave the key out.") from None
    return given
