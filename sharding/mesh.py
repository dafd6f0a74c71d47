"""The one mesh factory: axes data, tensor, expert over the given devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("data", "tensor", "expert")


def make_mesh(devices: Sequence[Any], *, data: int = 1, tensor: int = 1, expert: int = 1) -> Mesh:
    """Mesh [data, tensor, expert] over the first data · tensor · expert of `devices`.

    A whole TPU slice is ordered by its ICI torus; elsewhere the given order is kept. Raises
    ValueError when there are too few devices, naming both numbers.
    """
    shape = (data, tensor, expert)
    wanted = data * tensor * expert
    if wanted > len(devices):
        raise ValueError(
            f"the mesh data={data} × tensor={tensor} × expert={expert} needs {wanted} devices, "
            f"{len(devices)} found"
        )
    if devices[0].platform == "tpu" and wanted == len(devices):
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = np.array(devices[:wanted], dtype=object).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
