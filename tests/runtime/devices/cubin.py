"""What a cubin says of its functions: the size of each parameter, and the threads of a block.

The attributes are those that `cuobjdump -elf` shows (EIATTR_KPARAM_INFO, EIATTR_REQNTID); the driver reads the same.
"""
from __future__ import annotations

import struct
from dataclasses import dataclass

_WITH_PAYLOAD = 4  # EIFMT_SVAL
_KPARAM_INFO, _REQNTID = 0x17, 0x10
_NO_BITS = 8  # SHT_NOBITS


@dataclass(frozen=True)
class Function:
    """parameter_sizes in their order; threads of a block (x, y, z)."""

    parameter_sizes: tuple[int, ...]
    threads: tuple[int, int, int]


def capability(image: bytes) -> int:
    """The architecture that the code is for: 90 for sm_90a. Where it stands depends on the version of the form."""
    shift = 8 if image[8] >= 8 else 0
    return int(struct.unpack_from("<I", image, 0x30)[0] >> shift & 0xFF)


def functions(image: bytes) -> dict[str, Function]:
    found = {}
    for name, data in _sections(image).items():
        if name.startswith(".nv.info."):
            attributes = _attributes(data)
            sizes = {}
            for payload in attributes.get(_KPARAM_INFO, []):
                _, ordinal, _, flags = struct.unpack("<IHHI", payload)
                sizes[ordinal] = flags >> 18
            threads = struct.unpack("<III", attributes[_REQNTID][0])
            found[name.removeprefix(".nv.info.")] = Function(tuple(sizes[i] for i in range(len(sizes))), threads)
    return found


def _sections(image: bytes) -> dict[str, bytes]:
    assert image[:4] == b"\x7fELF", "a cubin is an ELF file"
    offset = struct.unpack_from("<Q", image, 0x28)[0]
    entry_size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, offset + number * entry_size) for number in range(count)]
    strings = headers[names][4]
    found = {}
    for header in headers:
        begin = strings + header[0]
        name = image[begin : image.index(b"\0", begin)].decode()
        found[name] = b"" if header[1] == _NO_BITS else image[header[4] : header[4] + header[5]]
    return found


def _attributes(data: bytes) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    at = 0
    while at < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _WITH_PAYLOAD:
            found.setdefault(attribute, []).append(data[at : at + value])
            at += value
    return found
