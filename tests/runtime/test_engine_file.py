"""The reader: what a right engine gives, one test per kind of damage, and that no damage goes unseen."""

import dataclasses
import hashlib
import os
import re
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from ingot.runtime import engine_file
from ingot.runtime.engine_file import EngineFile, verify
from ingot.runtime.engine_format import (
    ALIGNMENT,
    END_BYTES,
    MANIFEST,
    PLAN,
    EngineFormatError,
    EngineHashMismatch,
    EngineTruncated,
    EngineVersionError,
    Member,
    NotAnEngine,
    check_name,
    directory,
    end_records,
    local_header,
)
from ingot.runtime.errors import IngotError, RequestError
from tests.runtime.engine_sample import FILES, SMALL, assemble, finish, manifest_of, place, table, weight_members

ENGINE = assemble()
MEMBERS = place({**FILES, MANIFEST: manifest_of(FILES)})
BY_NAME = {member.name: member for member in MEMBERS}
WEIGHT = MEMBERS[0].name
DIRECTORY = MEMBERS[-1].end_offset
END = len(ENGINE) - END_BYTES


@pytest.fixture
def engine_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.engine"
    path.write_bytes(ENGINE)
    return path


def refuse(tmp_path: Path, data: bytes, kind: type[IngotError], message: str) -> None:
    """Opening `data` raises exactly `kind`, names the file, and `message` stands in the text."""
    path = tmp_path / "bad.engine"
    path.write_bytes(data)
    with pytest.raises(IngotError) as caught:
        verify(path)
    assert type(caught.value) is kind, str(caught.value)
    assert str(path) in str(caught.value)
    assert re.search(message, str(caught.value)), str(caught.value)


def flipped(offset: int, bit: int = 1, data: bytes = ENGINE) -> bytes:
    return data[:offset] + bytes([data[offset] ^ bit]) + data[offset + 1 :]


def replaced(offset: int, part: bytes, data: bytes = ENGINE) -> bytes:
    return data[:offset] + part + data[offset + len(part) :]


# A right engine


def test_golden_bytes() -> None:
    assert hashlib.sha256(ENGINE).hexdigest() == "f9ddf4051e631424da801e0fbdc91c476b0be1932bc86476de27a1780295dd19"


def test_reads_what_is_in_it(engine_path: Path) -> None:
    with EngineFile.open(engine_path) as engine:
        assert engine.hash == hashlib.sha256(manifest_of(FILES)).hexdigest()
        assert engine.manifest["precision"] == "fp32"
        assert engine.plan == {"launches": [1, 2, 3]}
        order = [MANIFEST, PLAN, "code/engine.so", "tokenizer/tokenizer.json", "debug/00_import.txt", *weight_members()]
        assert list(engine.members) == order
        for name, data in FILES.items():
            assert engine.read(name) == data
            assert engine.map(name).tobytes() == data
            assert engine.members[name].data_offset % ALIGNMENT == 0
        with pytest.raises(EngineFormatError, match=r"no member 'weights/none.bin'"):
            engine.read("weights/none.bin")
        with pytest.raises(EngineFormatError, match="no member"):
            engine.map("weights/none.bin")


def test_verify_lists_every_member(engine_path: Path) -> None:
    checks = verify(engine_path)
    assert {check.name: check.sha256 for check in checks if check.name != MANIFEST} == {
        name: entry["sha256"] for name, entry in table(FILES).items()
    }
    assert checks[0].name == MANIFEST and checks[0].sha256 == hashlib.sha256(manifest_of(FILES)).hexdigest()
    assert sum(check.size_bytes for check in checks) == sum(member.size for member in MEMBERS)


def test_verify_tells_its_progress(engine_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with EngineFile.open(engine_path) as engine:
        engine.verify(lambda done, total: seen.append((done, total)))
    total = sum(member.size for member in MEMBERS)
    assert seen[-1] == (total, total) and seen == sorted(seen) and len(seen) == len(MEMBERS)


def test_map_is_a_view_that_outlives_the_file(engine_path: Path) -> None:
    with EngineFile.open(engine_path) as engine:
        first, again = engine.map(WEIGHT), engine.map(WEIGHT)
    assert np.shares_memory(first, again)
    assert not first.flags.writeable
    assert first.ctypes.data % ALIGNMENT == 0
    assert first.tobytes() == FILES[WEIGHT]


def test_an_empty_member(tmp_path: Path) -> None:
    files = {**SMALL, "tokenizer/tokenizer.json": b""}
    (tmp_path / "e").write_bytes(assemble(files))
    with EngineFile.open(tmp_path / "e") as engine:
        engine.verify()
        assert engine.read("tokenizer/tokenizer.json") == b""
        assert engine.map("tokenizer/tokenizer.json").shape == (0,)


def test_zip_tools_read_it(engine_path: Path) -> None:
    with zipfile.ZipFile(engine_path) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == {**FILES, MANIFEST: manifest_of(FILES)}
        assert archive.namelist()[0] == MANIFEST
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())


def test_members_beyond_4_gib(tmp_path: Path) -> None:
    """Sizes and offsets that need 64 bits, in a sparse file; the weight's hash is not computed."""
    size = 5 << 30
    digest = "ab" * 32
    weight = Member(f"weights/{digest}.bin", size, 0, 0)
    manifest = manifest_of(SMALL, members={**table(SMALL), weight.name: {"sha256": digest, "size": size}})
    small = {**SMALL, MANIFEST: manifest}
    members = [weight]
    for name, data in small.items():
        members.append(Member(name, len(data), zlib.crc32(data), members[-1].end_offset))
    path = tmp_path / "large.engine"
    with path.open("wb") as file:
        file.write(local_header(weight))
        for member in members[1:]:
            file.seek(member.header_offset)
            file.write(local_header(member) + small[member.name])
        entries = directory(members)
        file.write(entries + end_records(len(members), members[-1].end_offset, len(entries)))
    if path.stat().st_blocks * 512 > 1 << 20:
        pytest.skip("this file system has no sparse files")
    with EngineFile.open(path) as engine:
        assert engine.map(weight.name).shape == (size,)
        assert engine.map("code/engine.so").tobytes() == SMALL["code/engine.so"]
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo(weight.name).file_size == size
        assert archive.read(PLAN) == SMALL[PLAN]


def test_open_reads_no_weights(engine_path: Path) -> None:
    """A damaged weight is found by verify, and by read, not by open."""
    engine_path.write_bytes(flipped(BY_NAME[WEIGHT].data_offset))
    with EngineFile.open(engine_path) as engine:
        with pytest.raises(EngineHashMismatch, match=WEIGHT):
            engine.read(WEIGHT)
        with pytest.raises(EngineHashMismatch, match=f"1 of {len(MEMBERS)} members are damaged:\n.*{WEIGHT}"):
            engine.verify()


@pytest.mark.parametrize("name", [PLAN, "code/engine.so"])
def test_open_checks_what_will_be_executed(engine_path: Path, name: str) -> None:
    engine_path.write_bytes(flipped(BY_NAME[name].end_offset - 1))
    with pytest.raises(EngineHashMismatch, match=f"member {name}: data have SHA-256"):
        EngineFile.open(engine_path)


def test_opening_imports_no_numpy(engine_path: Path) -> None:
    code = (
        "import sys; from ingot.runtime.engine_file import verify; verify(sys.argv[1]); print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, engine_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Files that can't be opened


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="No such file"):
        EngineFile.open(tmp_path / "none.engine")


def _refusal(path: Path) -> RequestError:
    with pytest.raises(RequestError) as caught:
        EngineFile.open(path)
    return caught.value


def test_a_checkpoint_is_to_be_built_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(5000))
    for path in (tmp_path, tmp_path / "x.gguf"):
        assert f"build an engine of it: ingot build {path} --target" in str(_refusal(path))


def test_a_folder_and_a_pipe(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is a folder"):
        EngineFile.open(tmp_path)
    assert "ingot build" not in str(_refusal(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError, match="not a regular file"):
        EngineFile.open(tmp_path / "pipe")


@pytest.mark.parametrize("data", [b"GGUF" + bytes(5000), b"PK\3\4" + bytes(5000), b"x"], ids=["gguf", "zip", "short"])
def test_wrong_magic(tmp_path: Path, data: bytes) -> None:
    refuse(tmp_path, data, NotAnEngine, f"not an engine: the {len(data)} bytes start {data[:4].hex()}")


def test_another_zip_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("manifest.json", "{}")
    refuse(tmp_path, (tmp_path / "other.zip").read_bytes(), NotAnEngine, "not an engine")


# Truncation and what follows the end

BORDERS = sorted(
    {offset for member in MEMBERS for offset in (member.header_offset, member.data_offset, member.end_offset)}
    | {0, 1, DIRECTORY, END, END + 56, END + 76, END + 98, len(ENGINE) - 1}
)


@pytest.mark.parametrize("size", BORDERS)
def test_truncated_at_every_border(tmp_path: Path, size: int) -> None:
    refuse(tmp_path, ENGINE[:size], EngineTruncated, f"{size} bytes")


def test_truncated_anywhere(tmp_path: Path) -> None:
    for size in range(3, len(ENGINE), 997):
        refuse(tmp_path, ENGINE[:size], EngineTruncated, f"{size} bytes")


@pytest.mark.parametrize("junk", [b"\0", b"junk" * 100, ENGINE[END:]], ids=["one", "some", "end"])
def test_trailing_junk(tmp_path: Path, junk: bytes) -> None:
    if junk == ENGINE[END:]:
        refuse(tmp_path, ENGINE + junk, EngineFormatError, r"end record: byte \d+ ")
    else:
        refuse(tmp_path, ENGINE + junk, EngineTruncated, f"{len(junk)} bytes follow the end record")


def test_leading_junk(tmp_path: Path) -> None:
    refuse(tmp_path, bytes(ALIGNMENT) + ENGINE, EngineFormatError, r"end record: byte \d+ ")


def test_file_that_shrinks_while_open(engine_path: Path) -> None:
    with EngineFile.open(engine_path) as engine:
        os.truncate(engine_path, BY_NAME[PLAN].data_offset + 5)
        with pytest.raises(EngineTruncated, match=r"plan\.json: the file ends at \d+, 15 bytes early"):
            engine.plan  # noqa: B018


# One flipped byte


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_flipped_data(tmp_path: Path, name: str) -> None:
    kind = r"CRC-32 \w{8}, expected \w{8}" if name == MANIFEST else r"SHA-256 \w{64}, expected \w{64}"
    for offset in (BY_NAME[name].data_offset, BY_NAME[name].end_offset - 1):
        refuse(tmp_path, flipped(offset), EngineHashMismatch, rf"member {re.escape(name)}: data have {kind}")


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_flipped_header(tmp_path: Path, name: str) -> None:
    start, end = BY_NAME[name].header_offset, BY_NAME[name].data_offset
    for index in (0, 14, 30, 30 + len(name), 30 + len(name) + 20, end - start - 1):  # signature, CRC, name, extras
        message = rf"header of {re.escape(name)}: byte {index} \(file offset {start + index}\) is \w\w, expected \w\w"
        refuse(tmp_path, flipped(start + index), EngineFormatError, message)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (0, "directory entry 0: starts with"),
        (4, "directory: byte 4 "),  # made by
        (8, r"member manifest.json: compression method 0, flags 0x0001"),
        (10, r"member manifest.json: compression method 1, flags 0x0000"),
        (12, "directory: byte 12 "),  # time
        (16, r"header of manifest.json: byte 14 "),  # CRC
        (20, "directory: byte 20 "),  # size, which stands in the ZIP64 field
        (28, "member name 'manifest.jso' is not allowed"),
        (30, "directory entry 0: .* extra field of 29"),
        (38, "directory: byte 38 "),  # mode
        (46, "member name 'lanifest.json' is not allowed"),
        (59, "directory: byte 59 "),  # ZIP64 field
        (63, r"member manifest.json: size \d+, stored size \d+"),
        (79, "overlaps|belong to no member"),
    ],
)
def test_flipped_directory(tmp_path: Path, offset: int, message: str) -> None:
    refuse(tmp_path, flipped(DIRECTORY + offset), EngineFormatError, message)


@pytest.mark.parametrize(
    ("offset", "kind", "message"),
    [
        (0, EngineFormatError, "end record: byte 0 "),
        (24, EngineFormatError, "end record: byte 32 "),  # number of members, which stands there twice
        (32, EngineFormatError, "end record: byte 32 "),
        (31, EngineFormatError, r"a directory of \d+ members in \d+ bytes is impossible"),
        (40, EngineFormatError, "end record: byte 48 "),  # size of the directory: its offset no longer fits
        (47, EngineFormatError, r"a directory of 7 members in \d+ bytes is impossible"),
        (56, EngineFormatError, "end record: byte 56 "),  # locator
        (76, EngineFormatError, "end record: byte 76 "),  # classic end record
        (98, EngineTruncated, "no end record in the last 122 of"),  # comment
        (121, EngineVersionError, "engine format 0 was never released"),
    ],
)
def test_flipped_end(tmp_path: Path, offset: int, kind: type[IngotError], message: str) -> None:
    refuse(tmp_path, flipped(END + offset), kind, message)


def test_every_byte_counts(engine_path: Path) -> None:
    """No byte of the file can change unseen. Each is tried, but of the zeros, most of them padding, every eighth."""
    with engine_path.open("r+b", buffering=0) as file:
        for offset in [offset for offset, byte in enumerate(ENGINE) if byte or offset % 8 == 0]:
            os.pwrite(file.fileno(), bytes([ENGINE[offset] ^ 0x10]), offset)
            with pytest.raises(EngineFormatError):
                verify(engine_path)
            os.pwrite(file.fileno(), ENGINE[offset : offset + 1], offset)
    verify(engine_path)


# Wrong layouts that a hostile writer could make consistent


def with_entry(name: str, change: Callable[[Member], Member]) -> bytes:
    """The engine, with one directory entry and local header changed and everything else left."""
    members = [change(member) if member.name == name else member for member in MEMBERS]
    header = local_header(change(BY_NAME[name]))
    data = replaced(BY_NAME[name].header_offset, header) if len(header) <= ALIGNMENT else ENGINE
    return finish(data[:DIRECTORY], members)


def test_newer_format(tmp_path: Path) -> None:
    message = r"engine format 2; this runtime reads formats up to 1\.\n  Upgrade"
    refuse(tmp_path, ENGINE[:-1] + b"2", EngineVersionError, message)
    newer = assemble(manifest=manifest_of(FILES, format_version=2, limits="changed"))
    refuse(tmp_path, newer, EngineVersionError, message)


def test_compressed_member(tmp_path: Path) -> None:
    method = struct.pack("<H", zipfile.ZIP_DEFLATED)
    data = replaced(DIRECTORY + 10, method, replaced(BY_NAME[MANIFEST].header_offset + 8, method))
    refuse(tmp_path, data, EngineFormatError, "member manifest.json: compression method 8, .* members are stored")


def test_duplicate_name(tmp_path: Path) -> None:
    members = [*MEMBERS[:3], dataclasses.replace(MEMBERS[3], name="debug/00_import.txt"), *MEMBERS[4:]]
    refuse(tmp_path, finish(ENGINE[:DIRECTORY], members), EngineFormatError, "txt stands in the directory twice")


@pytest.mark.parametrize(
    "name",
    ["code/../../etc/passwd", "/code/x", "code/./x", "code//x", "code/", "code/.x", "code\\x", "C:/x", "other/x", ""],
)
def test_path_traversal(tmp_path: Path, name: str) -> None:
    blob = ENGINE[:DIRECTORY]
    member = Member("code/" + "x" * len(name), 0, 0, len(blob))
    entries = directory([*MEMBERS, member]).replace(member.name.encode(), name.ljust(len(member.name), "/").encode())
    blob += local_header(member)
    refuse(tmp_path, finish(blob, [*MEMBERS, member], entries), EngineFormatError, "member name '.*' is not allowed")
    with pytest.raises(EngineFormatError, match="is not allowed"):
        check_name(name)


def test_long_name(tmp_path: Path) -> None:
    files = {**SMALL, "plan.json": b"{}"}
    files = {"code/" + "x" * 300: b"", **files}
    refuse(tmp_path, assemble(files), EngineFormatError, "member name of 305 bytes: at most 200|impossible")


def test_overlap_and_gap(tmp_path: Path) -> None:
    name = "code/engine.so"
    data = with_entry(name, lambda member: dataclasses.replace(member, header_offset=member.header_offset - 1))
    refuse(tmp_path, data, EngineFormatError, rf"{name} overlaps tokenizer/tokenizer.json: starts at \d+, expected \d+")
    data = with_entry(name, lambda member: dataclasses.replace(member, header_offset=member.header_offset + 1))
    refuse(tmp_path, data, EngineFormatError, rf"1 bytes between tokenizer/tokenizer.json and {name} belong to no mem")


def test_wrong_size_in_directory(tmp_path: Path) -> None:
    data = with_entry(PLAN, lambda member: dataclasses.replace(member, size=member.size + 1))
    refuse(tmp_path, data, EngineFormatError, "manifest.json overlaps plan.json")
    data = with_entry(MANIFEST, lambda member: dataclasses.replace(member, size=member.size + 1))
    refuse(tmp_path, data, EngineFormatError, r"members end at \d+, but the directory starts at \d+")
    data = with_entry(MANIFEST, lambda member: dataclasses.replace(member, size=1 << 62))
    refuse(tmp_path, data, EngineFormatError, r"members end at \d+, but")


def test_wrong_order(tmp_path: Path) -> None:
    files = dict(reversed(FILES.items()))
    refuse(tmp_path, assemble(files), EngineFormatError, "code/engine.so stands behind plan.json; the order")
    swapped = directory(MEMBERS[::-1])  # the two weights the other way round in the directory alone
    refuse(tmp_path, finish(ENGINE[:DIRECTORY], MEMBERS, swapped), EngineFormatError, r"directory: byte \d+ ")


@pytest.mark.parametrize("name", [PLAN, MANIFEST])
def test_required_member_is_missing(tmp_path: Path, name: str) -> None:
    files = {key: data for key, data in {**FILES, MANIFEST: manifest_of(FILES)}.items() if key != name}
    members = place(files)
    blob = b"".join(local_header(member) + files[member.name] for member in members)
    refuse(tmp_path, finish(blob, members), EngineFormatError, f"member {name} is missing")


def test_members_and_manifest_disagree(tmp_path: Path) -> None:
    fewer = {name: data for name, data in FILES.items() if name != WEIGHT}
    message = f"1 of {len(FILES)} members are missing, the first is {WEIGHT}"
    refuse(tmp_path, assemble(fewer, manifest_of(FILES)), EngineFormatError, message)
    message = f"1 members are not in the manifest, the first is {WEIGHT}"
    refuse(tmp_path, assemble(FILES, manifest_of(fewer)), EngineFormatError, message)
    longer = manifest_of({**FILES, "code/engine.so": bytes(65)})
    refuse(tmp_path, assemble(FILES, longer), EngineFormatError, "code/engine.so has 64 bytes, the manifest says 65")
    other = manifest_of({**FILES, "code/engine.so": bytes(64)})
    refuse(tmp_path, assemble(FILES, other), EngineHashMismatch, r"code/engine.so: data have SHA-256 \w{64}, expected")


def test_wrong_number_of_members(tmp_path: Path) -> None:
    size = END - DIRECTORY
    fewer, more = (ENGINE[:END] + end_records(len(MEMBERS) + by, DIRECTORY, size) for by in (-1, 1))
    refuse(tmp_path, fewer, EngineFormatError, rf"directory: 6 entries take \d+ bytes, expected {size}")
    refuse(tmp_path, more, EngineFormatError, "directory entry 7: needs 46 bytes, 0 are left")


def test_huge_manifest(engine_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = BY_NAME[MANIFEST].size
    monkeypatch.setattr(engine_file, "MAX_MANIFEST_BYTES", size - 1)
    with pytest.raises(EngineFormatError, match=rf"manifest\.json has {size} bytes, at most {size - 1} are allowed"):
        EngineFile.open(engine_path)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (b"not JSON", r"manifest\.json: not valid JSON"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, r"manifest\.json: JSON is nested too deeply"),
        (manifest_of(FILES) + b"\n", r"manifest\.json: not canonical JSON"),
        (b"{}", r"manifest\.json: format_version: required field is missing"),
    ],
)
def test_wrong_manifest(tmp_path: Path, manifest: bytes, message: str) -> None:
    refuse(tmp_path, assemble(manifest=manifest), EngineFormatError, message)


def test_plan_that_is_not_json(engine_path: Path) -> None:
    engine_path.write_bytes(assemble({**FILES, PLAN: b"[1]"}))
    with EngineFile.open(engine_path) as engine, pytest.raises(EngineFormatError, match=r"plan\.json: expected a JSON"):
        engine.plan  # noqa: B018
    engine_path.write_bytes(assemble({**FILES, PLAN: b'{"a": 1}'}))
    with pytest.raises(EngineFormatError, match=r"plan\.json: not canonical JSON"):
        verify(engine_path)


# Anything at all


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The engine after one to three edits: bytes flipped, cut out, inserted, copied elsewhere, or the end cut off."""
    data = bytearray(ENGINE)
    hot = st.sampled_from([member.header_offset for member in MEMBERS] + [DIRECTORY, END])
    for _ in range(draw(st.integers(1, 3))):
        anywhere = st.integers(0, max(0, len(data) - 1)) | hot.flatmap(lambda at: st.integers(at, at + 160))
        start, size = draw(anywhere), draw(st.integers(1, 300))
        edit = draw(st.sampled_from(["flip", "cut", "insert", "copy", "end"]))
        if edit == "flip" and start < len(data):
            data[start] ^= draw(st.integers(1, 255))
        elif edit == "cut":
            del data[start : start + size]
        elif edit == "insert":
            data[start:start] = draw(st.binary(min_size=1, max_size=40))
        elif edit == "copy":
            data[start : start + size] = ENGINE[(at := draw(anywhere)) : at + size]
        else:
            del data[start:]
    return bytes(data)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=damaged() | st.binary(max_size=200) | st.integers(1, 3000).map(lambda size: ENGINE[-size:]))
@example(data=b"")
@example(data=ENGINE[-24:])
@example(data=ENGINE[END:])
@example(data=ENGINE[DIRECTORY:])
@example(data=ENGINE * 2)
def test_no_damage_goes_unseen(tmp_path: Path, data: bytes) -> None:
    assume(data != ENGINE)
    path = tmp_path / "fuzzed.engine"
    path.write_bytes(data)
    with pytest.raises(IngotError):
        verify(path)
