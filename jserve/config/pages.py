"""How many tokens a page holds where --page-size does not say so.

Knows platforms by their KVLayout only; what else a page size must agree with is resolve.py's.
"""

from __future__ import annotations

from jserve.config.options import CacheOptions
from jserve.config.tree import Config
from jserve.errors import ConfigError
from jserve.types.kv_layout import KV_LAYOUTS, table_pages

#: The first that serves is automatic. 1024 is near what a block on a TPU may take of its VMEM.
PAGE_SIZES = (16, 32, 64, 128, 256, 512)


def least_page_size(cache: CacheOptions) -> int:
    """Before model and devices are known."""
    return cache.page_size or PAGE_SIZES[0]


def page_conflicts(max_total_tokens: int | None, page_size: int) -> dict[str, bool]:
    """What is wrong, in words, and whether it is."""
    return {
        f"--max-total-tokens {max_total_tokens} holds no page of --page-size {page_size}": (
            max_total_tokens is not None and max_total_tokens < page_size
        )
    }


def fitting_page_size(config: Config, platform: str, num_slots: int, context: int) -> int:
    """Of --page-size, else the fewest tokens with which the platform's kernel can hold all page
    tables. Raises ConfigError saying what fits.
    """
    asked, layout = config.cache.page_size, KV_LAYOUTS[platform]
    for size in PAGE_SIZES if asked is None else (asked,):
        if layout.holds_tables(num_slots, table_pages(context, size)):
            return size
    largest, ranks = asked or PAGE_SIZES[-1], config.execution.dp_size
    bigger = [s for s in PAGE_SIZES if layout.holds_tables(num_slots, table_pages(context, s))]
    slots = layout.most_slots(table_pages(context, largest))
    longest = (layout.most_pages(num_slots) - 1) * largest
    fitting = [
        *(f"--page-size {size}" for size in bigger[:1]),
        *(f"--max-running-requests {ranks * slots}" for _ in range(slots > 0)),
        *(f"--context-length {longest}" for _ in range(longest > 1)),
    ]
    raise ConfigError(
        f"--page-size {largest} makes the page tables of --max-running-requests "
        f"{ranks * num_slots} with --context-length {context} too large for a {platform}'s "
        f"kernel; {' or '.join(fitting) or 'less of both'} would fit"
    )
