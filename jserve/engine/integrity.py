"""What the engine does when its pages, locks or slots are in disorder."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from jserve.types import Delta

if TYPE_CHECKING:
    from jserve.scheduler.scheduler import Scheduler

logger = logging.getLogger("jserve.engine")


def check_integrity(scheduler: Scheduler) -> list[Delta]:
    """A page, a lock or a slot that is lost or shared is our bug, not the device's. Nothing is in
    flight, so that starting over costs the cache and no request: say it loudly, and go on.
    """
    try:
        scheduler.check_integrity()
    except AssertionError as error:
        logger.critical("integrity check failed, starting over with an empty cache: %s", error)
        return scheduler.rebuild()
    return []
