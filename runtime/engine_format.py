"""Layout of the engine file: the bytes around the members, shared by the writer and the reader.

An engine is a ZIP64 archive of stored members. Everything in it that is not a member's data is a function of the
members' names, sizes, CRCs and offsets, and this module computes it:

    local_header(member)      in front of each member's data, padded so that the data start on a page
    directory(members)        the central directory
    end_records(count, size)  the last END_BYTES of the file; its comment tells the format version

The writer writes these bytes. The reader parses only the directory, builds all the rest again and compares: there is
one valid encoding and no byte that nothing checks. docs/engine-format.md explains the choices.
"""

import itertools
import re
import struct
from dataclasses import dataclass

from .errors import RequestError

FORMAT_VERSION = 1
ALIGNMENT = 4096
MANIFEST, PLAN, REFIT, SELF_TEST = "manifest.json", "plan.json", "refit.json", "selftest.json"

# Weights stream first because their sizes and hashes come one by one; the manifest, which holds them, ends the data.
# The directory lists the sections the other way round, so that a listing starts with what people look for.
FILE_ORDER = ("weights/", "debug/", "tokenizer/", REFIT, SELF_TEST, "code/", PLAN, MANIFEST)
DIRECTORY_ORDER = FILE_ORDER[::-1]

MAX_MEMBERS = 1 << 20
MAX_NAME_BYTES = 200
_NAME = re.compile(
    r"(?:(?:manifest|plan|refit|selftest)\.json|(?:weights|debug|tokenizer|code)(?:/[A-Za-z0-9_][A-Za-z0-9_.+-]*)+)"
)

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_ZIP64_LOCAL = struct.Struct("<2H2Q")  # sizes
_ZIP64_CENTRAL = struct.Struct("<2H3Q")  # sizes and offset
_PADDING = struct.Struct("<3H")  # the alignment field that Android's zipalign registered: id, length, alignment

_LOCAL_SIGNATURE, _CENTRAL_SIGNATURE = b"PK\3\4", b"PK\1\2"
_VERSION_NEEDED = 45  # 4.5: ZIP64
_MADE_BY = 3 << 8 | _VERSION_NEEDED  # 3: Unix, so that unpacked files get the mode below
_MODE = 0o100644 << 16
_DATE = 1 << 5 | 1  # 1980-01-01, the first day that ZIP can tell
_IN_ZIP64 = 0xFFFFFFFF  # every size and offset stands in a ZIP64 field, needed or not: one layout, always exercised

COMMENT_PREFIX = b"ingot engine format "
_COMMENT = COMMENT_PREFIX + b"%04d" % FORMAT_VERSION
END_BYTES = _END64.size + _LOCATOR.size + _END.size + len(_COMMENT)
MAX_DIRECTORY_ENTRY_BYTES = _CENTRAL.size + MAX_NAME_BYTES + _ZIP64_CENTRAL.size

# What the first bytes of every engine are; tells a truncated engine from a file of another kind.
FIRST_BYTES = struct.pack("<4s5H", _LOCAL_SIGNATURE, _VERSION_NEEDED, 0, 0, 0, _DATE)


class EngineFormatError(RequestError):
    """The file breaks a rule of the engine format; the message names the member or record, with numbers."""


class NotAnEngine(EngineFormatError):
    """The file is of another kind."""


class EngineTruncated(EngineFormatError):
    """The file does not end where an engine ends: cut off, or something was appended."""


class EngineVersionError(EngineFormatError):
    """The file's format version is one that this runtime does not read."""


class EngineHashMismatch(EngineFormatError):
    """The data of a member are not the data that the manifest names."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member: its name, data size in bytes, CRC-32 of the data, and the file offset of its local header."""

    name: str
    size: int
    crc: int
    header_offset: int

    @property
    def data_offset(self) -> int:
        """File offset of the first data byte, a multiple of ALIGNMENT."""
        shortest = _LOCAL.size + len(self.name) + _ZIP64_LOCAL.size + _PADDING.size
        return -(-(self.header_offset + shortest) // ALIGNMENT) * ALIGNMENT

    @property
    def end_offset(self) -> int:
        """File offset behind the last data byte, where the next member's header or the directory starts."""
        return self.data_offset + self.size


def section(name: str) -> str:
    """The entry of FILE_ORDER that a valid member name belongs to."""
    folder, slash, _ = name.partition("/")
    return folder + slash


def check_name(name: str) -> None:
    """Raises EngineFormatError unless `name` is one that an engine may hold; it can never leave a folder."""
    if len(name) > MAX_NAME_BYTES:
        raise EngineFormatError(f"member name of {len(name)} bytes: at most {MAX_NAME_BYTES} are allowed")
    if not _NAME.fullmatch(name):
        raise EngineFormatError(
            f"member name {name!r} is not allowed: expected {MANIFEST}, {PLAN}, {REFIT}, {SELF_TEST} or a path of "
            "letters, digits and '_.+-' below code/, weights/, tokenizer/ or debug/, no part of which starts with a dot"
        )


def check_version(version: int) -> None:
    """Raises EngineVersionError, with the next step, for a format version that this code does not read."""
    if version > FORMAT_VERSION:
        raise EngineVersionError(
            f"engine format {version}; this runtime reads formats up to {FORMAT_VERSION}.\n"
            "  Upgrade the runtime (pip install --upgrade ingot-llm) or build the engine with this version."
        )
    if version < FORMAT_VERSION:
        raise EngineVersionError(f"engine format {version} was never released; build the engine again: ingot build")


def local_header(member: Member) -> bytes:
    """The bytes from `member.header_offset` to `member.data_offset`."""
    name = member.name.encode("ascii")
    sizes = _ZIP64_LOCAL.pack(1, 16, member.size, member.size)
    room = member.data_offset - member.header_offset - _LOCAL.size - len(name) - len(sizes) - _PADDING.size
    extra = sizes + _PADDING.pack(0xD935, room + 2, ALIGNMENT) + bytes(room)
    return (
        _LOCAL.pack(
            _LOCAL_SIGNATURE, _VERSION_NEEDED, 0, 0, 0, _DATE, member.crc, _IN_ZIP64, _IN_ZIP64, len(name), len(extra)
        )
        + name
        + extra
    )


def directory(members: list[Member]) -> bytes:
    """The central directory of members that stand in file order."""
    ordered = sorted(members, key=lambda member: DIRECTORY_ORDER.index(section(member.name)))
    return b"".join(map(_directory_entry, ordered))


def _directory_entry(member: Member) -> bytes:
    name = member.name.encode("ascii")
    extra = _ZIP64_CENTRAL.pack(1, 24, member.size, member.size, member.header_offset)
    fixed = (_CENTRAL_SIGNATURE, _MADE_BY, _VERSION_NEEDED, 0, 0, 0, _DATE, member.crc, _IN_ZIP64, _IN_ZIP64)
    return _CENTRAL.pack(*fixed, len(name), len(extra), 0, 0, 0, _MODE, _IN_ZIP64) + name + extra


def end_records(num_members: int, directory_offset: int, directory_size: int) -> bytes:
    """The last END_BYTES of an engine."""
    end64_offset = directory_offset + directory_size
    counts = (num_members, num_members, directory_size, directory_offset)
    return (
        _END64.pack(b"PK\6\6", _END64.size - 12, _MADE_BY, _VERSION_NEEDED, 0, 0, *counts)
        + _LOCATOR.pack(b"PK\6\7", 0, end64_offset, 1)
        + _END.pack(b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _IN_ZIP64, _IN_ZIP64, len(_COMMENT))
        + _COMMENT
    )


def parse_end_records(data: bytes, file_size: int) -> tuple[int, int, int]:
    """The number of members, offset and size of the directory, from the last END_BYTES of a file.

    Raises NotAnEngine if they do not end in the comment of an engine (the caller knows more), EngineVersionError, or
    EngineFormatError.
    """
    comment = data[-len(_COMMENT) :]
    is_ours = comment.startswith(COMMENT_PREFIX) and comment[len(COMMENT_PREFIX) :].isdigit()
    if len(data) < END_BYTES or not is_ours:
        raise NotAnEngine("does not end as an engine does")
    check_version(int(comment[len(COMMENT_PREFIX) :]))
    num_members, _, size, _ = _END64.unpack_from(data)[-4:]
    room = file_size - END_BYTES
    if num_members > MAX_MEMBERS or size > room or size > num_members * MAX_DIRECTORY_ENTRY_BYTES:
        raise EngineFormatError(
            f"end record: a directory of {num_members} members in {size} bytes is impossible: at most {MAX_MEMBERS} "
            f"members of {MAX_DIRECTORY_ENTRY_BYTES} bytes each, in a file that has room for {room}"
        )
    expect_bytes(data, end_records(num_members, room - size, size), "end record", room)
    return num_members, room - size, size


def parse_directory(data: bytes, num_members: int, file_offset: int) -> list[Member]:
    """The members in file order, from a central directory that stands at `file_offset`.

    Checks everything but the local headers and the data: names, duplicates, order, overlap, gaps. Raises
    EngineFormatError.
    """
    members: dict[str, Member] = {}
    position = 0
    for index in range(num_members):
        member, position = _parse_entry(data, position, f"directory entry {index}")
        if member.name in members:
            raise EngineFormatError(f"member {member.name} stands in the directory twice")
        members[member.name] = member
    if position != len(data):
        raise EngineFormatError(f"directory: {num_members} entries take {position} bytes, expected {len(data)}")
    in_file = sorted(members.values(), key=lambda member: member.header_offset)
    _check_offsets(in_file, file_offset)
    for before, after in itertools.pairwise(in_file):
        if FILE_ORDER.index(section(before.name)) > FILE_ORDER.index(section(after.name)):
            raise EngineFormatError(f"member {after.name} stands behind {before.name}; the order of sections is fixed")
    expect_bytes(data, directory(in_file), "directory", file_offset)
    return in_file


def _parse_entry(data: bytes, position: int, where: str) -> tuple[Member, int]:
    if position + _CENTRAL.size > len(data):
        raise EngineFormatError(f"{where}: needs {_CENTRAL.size} bytes, {len(data) - position} are left")
    signature, _, _, flags, method, _, _, crc, _, _, name_size, extra_size, *_ = _CENTRAL.unpack_from(data, position)
    if signature != _CENTRAL_SIGNATURE:
        raise EngineFormatError(f"{where}: starts with {signature!r}, expected {_CENTRAL_SIGNATURE!r}")
    end = position + _CENTRAL.size + name_size + _ZIP64_CENTRAL.size
    if extra_size != _ZIP64_CENTRAL.size or end > len(data):
        raise EngineFormatError(
            f"{where}: name of {name_size} and extra field of {extra_size} bytes, expected an extra field of "
            f"{_ZIP64_CENTRAL.size} within the {len(data) - position} bytes that are left"
        )
    raw_name = data[position + _CENTRAL.size :][:name_size]
    name = raw_name.decode("ascii", "backslashreplace")
    check_name(name)
    if method != 0 or flags != 0:
        raise EngineFormatError(
            f"member {name}: compression method {method}, flags {flags:#06x}; expected 0 and 0: members are stored"
        )
    _, _, size, stored_size, offset = _ZIP64_CENTRAL.unpack_from(data, end - _ZIP64_CENTRAL.size)
    if size != stored_size:
        raise EngineFormatError(f"member {name}: size {size}, stored size {stored_size}; they must be equal")
    return Member(name, size, crc, offset), end


def _check_offsets(members: list[Member], directory_offset: int) -> None:
    """Members fill the file from its start to the directory, one behind the other."""
    end, before = 0, "the start of the file"
    for member in members:
        if member.header_offset < end:
            raise EngineFormatError(
                f"member {member.name} overlaps {before}: starts at {member.header_offset}, expected {end}"
            )
        if member.header_offset > end:
            raise EngineFormatError(
                f"{member.header_offset - end} bytes between {before} and {member.name} belong to no member"
            )
        end, before = member.end_offset, member.name
    if end != directory_offset:
        raise EngineFormatError(f"members end at {end}, but the directory starts at {directory_offset}")


def expect_bytes(data: bytes, expected: bytes, what: str, file_offset: int) -> None:
    """Raises EngineFormatError that names the first byte in which `data`, found at `file_offset`, differs."""
    if data != expected:
        pairs = enumerate(zip(data, expected, strict=False))
        index = next((i for i, (got, want) in pairs if got != want), min(len(data), len(expected)))
        got, want = (part[index : index + 1].hex() or "nothing" for part in (data, expected))
        raise EngineFormatError(f"{what}: byte {index} (file offset {file_offset + index}) is {got}, expected {want}")
