"""Matrices in shared memory as descriptors of 64 bits tell of them: operands of wgmma and tcgen05.

A matrix is made of atoms, 8 lines of `width` bytes, and the 16-byte pieces of an atom are permuted by exclusive or of
address bits 4… with bits 7…. A line runs along the channels (K) where the matrix is K-major, else along its rows (M or
N). Two strides say where the next atom is:

    K-major    SBO: 8 rows on. Channels stay within one atom; without a swizzle, where an atom is 8 × 16 bytes, LBO: the
               next 16 bytes of channels
    MN-major   LBO: the next `width` bytes of rows, SBO: 8 channels on; without a swizzle the other way round

Source: PTX ISA, "Strides", "Shared memory matrix layout", "Matrix descriptor format" of wgmma and of tcgen05.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .instruction import PtxError
from .memory import SharedAccess
from .tensor_elements import BITS, split_nibbles
from .warp import Block

_WGMMA_WIDTHS = {0: 16, 1: 128, 2: 64, 3: 32}
_TCGEN05_WIDTHS = {0: 16, 2: 128, 4: 64, 6: 32}


@dataclass(frozen=True)
class SharedMatrix:
    """start, leading, stride: bytes (LBO is `leading`); width: bytes of a line of an atom, 16 without a swizzle."""

    start: int
    leading: int
    stride: int
    width: int


def of_wgmma(descriptor: int) -> SharedMatrix:
    """Raises PtxError for forms that are not supported."""
    return _parsed(descriptor, _WGMMA_WIDTHS.get(descriptor >> 62 & 3), "wgmma")


def of_tcgen05(descriptor: int) -> SharedMatrix:
    """Raises PtxError for forms that are not supported, and for those that are none of tcgen05."""
    if descriptor >> 46 & 7 != 1:
        raise PtxError(f"matrix descriptor {descriptor:#x}: bits 46 to 48 are {descriptor >> 46 & 7}, expected 1")
    if descriptor >> 52 & 1:
        raise PtxError(f"matrix descriptor {descriptor:#x}: absolute leading addresses are not supported")
    return _parsed(descriptor, _TCGEN05_WIDTHS.get(descriptor >> 61 & 7), "tcgen05")


def _parsed(descriptor: int, width: int | None, of: str) -> SharedMatrix:
    if width is None:
        raise PtxError(f"matrix descriptor {descriptor:#x}: this swizzle of {of} is not supported")
    if descriptor >> 49 & 7:
        raise PtxError(f"matrix descriptor {descriptor:#x}: a base offset is not supported")
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    return SharedMatrix(start, leading, stride, width)


def swizzled(address: np.ndarray, width: int) -> np.ndarray:
    """Where the byte lies that a pattern of `width` bytes a line (16: none) has at this address."""
    return address ^ ((address >> 7 & (width // 16 - 1)) << 4)


@lru_cache(4096)
def places(matrix: SharedMatrix, rows: int, columns: int, is_k_major: bool) -> np.ndarray:
    """Byte addresses of a matrix of `rows` × `columns` bytes along K, i64 [rows, columns], if it is K-major; else of
    `rows` channels × `columns` bytes along M or N."""
    line = np.arange(rows)[:, None]
    byte = np.arange(columns)[None, :]
    along, across = _strides(matrix, is_k_major)
    if is_k_major and matrix.width > 16:
        address = matrix.start + line % 8 * matrix.width + line // 8 * across + byte
    else:
        within = line % 8 * matrix.width + byte % matrix.width
        address = matrix.start + within + line // 8 * across + byte // matrix.width * along
    return swizzled(address, matrix.width)


def _strides(matrix: SharedMatrix, is_k_major: bool) -> tuple[int, int]:
    """Bytes to the next atom along the lines, and across them."""
    if is_k_major or matrix.width > 16:
        return matrix.leading, matrix.stride
    return matrix.stride, matrix.leading


def check_fenced(access: SharedAccess, block: Block, matrix: SharedMatrix, rows: int, channels: int, kind: str,
                 is_k_major: bool) -> np.ndarray:
    """Raises PtxError if threads have written what is not fenced yet. Returns the addresses of the matrix, as far as
    they are in bounds: that is checked when it is read."""
    lines, length = (rows, channels) if is_k_major else (channels, rows)
    address = np.minimum(places(matrix, lines, length * BITS[kind] // 8, is_k_major), len(block.shared) - 1)
    access.check_fenced(block.number, address)
    return address


def read_matrix(shared: np.ndarray, matrix: SharedMatrix, rows: int, channels: int, kind: str,
                is_k_major: bool) -> np.ndarray:
    """Bits of the elements [rows, channels], rows of M or N."""
    bits = BITS[kind]
    lines, length = (rows, channels) if is_k_major else (channels, rows)
    if bits == 4 and not is_k_major:
        raise PtxError("matrices of four bits are K-major")
    address = places(matrix, lines, length * bits // 8, is_k_major)
    if int(address.max()) >= len(shared):
        raise PtxError(f"a matrix of {rows} × {channels} {kind} at {matrix} ends at {int(address.max())}, behind the "
                       f"{len(shared)} bytes of shared memory")
    data = shared[address]
    found = split_nibbles(data) if bits == 4 else data.view({8: np.uint8, 16: np.uint16, 32: np.uint32}[bits])
    return found if is_k_major else np.ascontiguousarray(found.T)
