"""What the C library does with freed memory."""

import ctypes
from typing import Final

KEPT_BYTES: Final = 32 << 20
HEAP_BYTES: Final = 8 << 20

# <malloc.h> of the GNU C library.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Keep up to `KEPT_BYTES` for what is allocated next; pieces above `HEAP_BYTES` are still given back.

    By itself the GNU C library gives back all that a body of some megabytes took, several times over while it
    is read, and the kernel clears every page of it anew: half of the time that such a body takes. Other
    libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, HEAP_BYTES)
