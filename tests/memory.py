"""How much memory something takes."""

from __future__ import annotations

import ctypes
import tracemalloc
from collections.abc import Callable


def peak_of(body: Callable[[], object]) -> int:
    """The most bytes that Python objects and arrays made by ``body`` held at a time."""
    tracemalloc.start()
    try:
        body()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class _Malloc(ctypes.Structure):
    """Struct mallinfo2 of glibc."""

    _fields_ = (("arena", ctypes.c_size_t), ("blocks", 3 * ctypes.c_size_t), ("hblkhd", 6 * ctypes.c_size_t))


def goes_back_to_the_system(size: int = 31 * 2**20) -> bool:
    """Whether this process gives a block back as soon as it frees it: glibc maps it apart from its heap."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype, libc.malloc.restype, libc.free.argtypes = _Malloc, ctypes.c_void_p, [ctypes.c_void_p]
    before = libc.mallinfo2().hblkhd[0]
    block = libc.malloc(ctypes.c_size_t(size))
    mapped: int = libc.mallinfo2().hblkhd[0] - before
    libc.free(block)
    return mapped >= size
