"""How keys, values and page tables have to lie for a platform's attention kernels.

Numbers only, for resolve, the models and the pool alike: knows no array, and no model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class KVLayout:
    """`fused`: keys and values lie in one array, interleaved by head. `head_dim`: of a stored head,
    to which shorter ones are padded and longer ones are not served; None: the model's. `tiled`:
    a device holds as many heads as whole tiles do, zeros among them. `table_bytes`: what one
    step's page tables may take; None: any size.
    """

    fused: bool = False
    head_dim: int | None = None
    tiled: bool = False
    table_bytes: int | None = None

    def heads(self, kv_heads: int, ways: int) -> int:
        """How many KV heads each of `ways` devices stores, the fewest that will do."""
        each = -(-kv_heads // ways)
        if not self.tiled:
            return each
        return next((count for count in (1, 2, 4) if count >= each), -(-each // 8) * 8)

    def takes_float8(self, heads: int) -> bool:
        """Of so many on a device: a tile has four rows where it has two of bfloat16."""
        return not self.tiled or heads in (2, 4, 8) or heads % 16 == 0

    def holds_tables(self, num_slots: int, num_pages: int) -> bool:
        """Whether the page tables of so many rows fit; they are padded to whole tiles."""
        padded = 4 * _rounded_up(num_slots, 8) * _rounded_up(num_pages, 128)
        return self.table_bytes is None or padded <= self.table_bytes

    def most_slots(self, num_pages: int) -> int:
        """With tables of so many pages, where `table_bytes` bounds them."""
        assert self.table_bytes is not None
        return self.table_bytes // (4 * _rounded_up(num_pages, 128)) // 8 * 8

    def most_pages(self, num_slots: int) -> int:
        """Of a table, for so many slots, where `table_bytes` bounds them."""
        assert self.table_bytes is not None
        return self.table_bytes // (4 * _rounded_up(num_slots, 8)) // 128 * 128


#: A TPU kernel loads bfloat16 heads of 128 numbers, by whole tiles, and reads the tables from 1 MiB
#: of scalar memory, of which it needs little else.
KV_LAYOUTS: Mapping[str, KVLayout] = {
    "cpu": KVLayout(),
    "gpu": KVLayout(),
    "tpu": KVLayout(fused=True, head_dim=128, tiled=True, table_bytes=(9 << 20) // 10),
}


def table_pages(context_length: int, page_size: int) -> int:
    """Page ids that a slot's table holds: of a whole context, and of the token behind it."""
    return -(-context_length // page_size) + 1


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
