"""Memory of a launch: the given arrays with gaps between them, and the blocks' shared memory with its race checker.

Nothing passes by luck: an access outside of an array or of a block's shared memory, or one that is not aligned to its
size, is a PtxError. Two warps that touch the same bytes of shared memory without a barrier between, one of them
writing, are one too; writing what is there already is not, since Triton has threads store the same value twice."""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .instruction import PtxError
from .races import RaceError

if TYPE_CHECKING:
    from .warp import Warps

BASE = 0x7F0000000000
"""Of global addresses."""
PARAM_BASE = 0x7E000000
"""Of parameters whose address a kernel takes: tensor maps. Such addresses have 32 bits."""
POISON = 0xFF
"""Memory that nobody has written: NaN as a number of 16 or 32 bits, and no likely index."""

_GAP = 512
_GRANULE = 16
_SEVERAL = 0xFF


class GlobalMemory:
    """addresses: of each array, a multiple of 16 and no more."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._places: dict[str, tuple[int, np.ndarray]] = {}
        end = _GAP
        for name, array in arrays.items():
            self._places[name] = end, array
            end += -(-array.nbytes // 32) * 32 + _GAP + _GRANULE
        end = -(-end // 128) * 128
        self.bytes = np.full(end, POISON, np.uint8)
        self._valid = np.zeros(end // _GRANULE, np.uint8)
        self._valid[0] = self._valid[1] = _GRANULE  # where lanes that are not active look
        for at, array in self._places.values():
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self.bytes[at : at + data.size] = data
            whole, rest = divmod(data.size, _GRANULE)
            self._valid[at // _GRANULE : at // _GRANULE + whole] = _GRANULE
            if rest:
                self._valid[at // _GRANULE + whole] = rest
        self.addresses = {name: BASE + at for name, (at, _) in self._places.items()}
        self._views: dict[tuple[str, int], np.ndarray] = {}

    def arrays(self) -> dict[str, np.ndarray]:
        """What the arrays hold now."""
        return {name: self.bytes[at : at + array.nbytes].view(array.dtype).reshape(array.shape).copy()
                for name, (at, array) in self._places.items()}

    def view(self, kind: str, count: int) -> np.ndarray:
        found = self._views.get((kind, count))
        if found is None:
            found = self._views[kind, count] = self.bytes.view(kind).reshape(-1, count)
        return found

    def offsets(self, address: np.ndarray, size: int, mask: Any) -> np.ndarray:
        """Checked offsets in `bytes`; of lanes that are not active 0. address: u64."""
        offset = address - np.uint64(BASE)
        if mask is not True:
            offset = np.where(mask, offset, np.uint64(0))
        if (offset & np.uint64(size - 1)).any():
            self._refuse(address, offset & np.uint64(size - 1) != 0, size, "not aligned")
        granule = offset >> np.uint64(4)
        if int(granule.max()) + (size - 1) // _GRANULE >= len(self._valid):
            self._refuse(address, offset >= np.uint64(len(self.bytes) - size), size, "outside of all arrays")
        for part in range(-(-size // _GRANULE)):
            needed = (offset & np.uint64(15)) + np.uint64(min(size, _GRANULE))
            bad = needed > self._valid[granule + np.uint64(part)]
            if bad.any():
                self._refuse(address, bad, size, "outside of all arrays")
        return offset

    def load(self, address: np.ndarray, size: int, mask: Any) -> np.ndarray:
        """u8 [lanes, size], zeros where not active."""
        at = self.offsets(address, size, mask)
        found = self.bytes[at[:, None] + np.arange(size, dtype=np.uint64)]
        return found if mask is True else np.where(np.asarray(mask)[:, None], found, np.uint8(0))

    def store(self, address: np.ndarray, data: np.ndarray, mask: Any) -> None:
        """data: u8 [lanes, size]."""
        at = self.offsets(address, data.shape[1], mask)
        places = at[:, None] + np.arange(data.shape[1], dtype=np.uint64)
        if mask is True:
            self.bytes[places] = data
        else:
            self.bytes[places[mask]] = data[mask]

    def note_read(self, warps: Warps, at: np.ndarray, size: int) -> None:
        """at: checked offsets. Raises PtxError if it races with a write."""
        if (races := warps.launch.global_races) is not None:
            try:
                races.load(warps, at, size)
            except RaceError as error:
                raise PtxError(f"race: {self._near(error.at)} is {error}") from None

    def note_write(self, warps: Warps, at: np.ndarray, data: np.ndarray) -> None:
        """data: u8 [lanes, size]. Raises PtxError if it races with a read or another write."""
        if (races := warps.launch.global_races) is not None:
            try:
                races.store(warps, at, data, self.bytes)
            except RaceError as error:
                raise PtxError(f"race: {self._near(error.at)} is {error}") from None

    def _near(self, at: int) -> str:
        before = [(begin, name, array.nbytes) for name, (begin, array) in self._places.items() if begin <= at]
        if not before:
            return "before the first array"
        begin, name, num_bytes = max(before)
        return f"byte {at - begin} of {name}, which has {num_bytes}"

    def _refuse(self, address: np.ndarray, bad: np.ndarray, size: int, what: str) -> None:
        lane = int(np.flatnonzero(bad)[0])
        near = self._near(int(address[lane]) - BASE)
        raise PtxError(f"access of {size} bytes in global memory, {what}: {int(address[lane]):#x} ({near}), thread "
                       f"{lane}")


class LocalMemory:
    """What each lane has for itself."""

    def __init__(self, lanes: int, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._lane_bytes = -(-max(num_bytes, 1) // _GRANULE) * _GRANULE
        self._bytes = np.full(lanes * self._lane_bytes, POISON, np.uint8)
        self._base = np.arange(lanes) * self._lane_bytes

    def view(self, kind: str, count: int) -> np.ndarray:
        return self._bytes.view(kind).reshape(-1, count)

    def offsets(self, warps: Warps, address: np.ndarray, size: int) -> np.ndarray:
        """Checked offsets in the memory of all lanes, i64."""
        at = address.astype(np.int64)
        if warps.mask is not True:
            at = np.where(warps.mask, at, 0)
        bad = (at & (size - 1) != 0) | (at < 0) | (at > self._num_bytes - size)
        if bad.any():
            lane = int(np.flatnonzero(bad)[0])
            raise PtxError(f"access of {size} bytes in local memory at {int(at[lane])}, which has {self._num_bytes} "
                           f"bytes, thread {lane}")
        return at + self._base


class SharedAccess:
    """Shared memory of the blocks of one group of warps, side by side. block_bytes: of each, a multiple of 128.
    races: whether to look for them; programs that wait for other things than barriers of all threads cannot be."""

    def __init__(self, num_blocks: int, num_bytes: int, races: bool) -> None:
        self.num_bytes = num_bytes
        self.block_bytes = -(-max(num_bytes, 1) // 128) * 128
        self.bytes = np.full(num_blocks * self.block_bytes, POISON, np.uint8)
        self.races = races
        self._touched = np.zeros(num_blocks, bool)
        self._writers = np.zeros_like(self.bytes) if races else self.bytes
        self._readers = np.zeros_like(self.bytes) if races else self.bytes
        self._unfenced = np.zeros_like(self.bytes)
        """What threads have written, and units that copy and multiply may not read before a fence: the mark of a warp,
        or _SEVERAL behind a barrier, where a fence of any warp will do."""
        self._has_unfenced = np.zeros(num_blocks, bool)
        self._views: dict[tuple[int, str, int], np.ndarray] = {}

    def block(self, number: int) -> np.ndarray:
        return self.bytes[number * self.block_bytes :][: self.num_bytes]

    def view(self, kind: str, count: int, which: int = 0) -> np.ndarray:
        """which: 0 what is there, 1 who has written, 2 who has read."""
        found = self._views.get((which, kind, count))
        if found is None:
            array = (self.bytes, self._writers, self._readers)[which]
            found = self._views[which, kind, count] = array.view(kind).reshape(-1, count)
        return found

    def offsets(self, warps: Warps, address: np.ndarray, size: int) -> np.ndarray:
        """Checked offsets in `bytes`, i64; of lanes that are not active those of their block's first byte."""
        at = address.astype(np.int64)
        if warps.mask is not True:
            at = np.where(warps.mask, at, 0)
        if (at & (size - 1)).any():
            self._refuse(at, at & (size - 1) != 0, size, "not aligned")
        if int(at.view(np.uint64).max()) > self.num_bytes - size:  # below 0 is far above as well
            bad = (at < 0) | (at > self.num_bytes - size)
            self._refuse(at, bad, size, f"outside of the block's {self.num_bytes} bytes")
        return at + warps.shared_base

    def load(self, warps: Warps, address: np.ndarray, size: int) -> np.ndarray:
        """u8 [lanes, size], zeros where not active. size: a power of two."""
        at = self.offsets(warps, address, size)
        self.note_read(warps, at, size)
        found = self.view("u1", size)[at // size]
        return found if warps.mask is True else np.where(warps.mask[:, None], found, np.uint8(0))

    def store(self, warps: Warps, address: np.ndarray, data: np.ndarray) -> None:
        """data: u8 [lanes, size]."""
        size = data.shape[1]
        at = self.offsets(warps, address, size)
        self.note_write(warps, at, data)
        if warps.mask is True:
            self.view("u1", size)[at // size] = data
        else:
            self.view("u1", size)[at[warps.mask] // size] = data[warps.mask]

    # races

    def barrier(self, block: int) -> None:
        """All threads of the block have met: what they did before is done."""
        if self._has_unfenced[block]:
            unfenced = self._unfenced[block * self.block_bytes :][: self.block_bytes]
            unfenced[unfenced != 0] = _SEVERAL
        if self.races and self._touched[block]:
            part = slice(block * self.block_bytes, (block + 1) * self.block_bytes)
            self._writers[part] = 0
            self._readers[part] = 0
            self._touched[block] = False

    def note_read(self, warps: Warps, at: np.ndarray, size: int) -> None:
        if not self.races:
            return
        kind, count, index, mine = self._marks(warps, at, size)
        writers, readers = self.view(kind, count, 1), self.view(kind, count, 2)
        seen = writers[index]
        suspect = (seen != 0) & (seen != mine)
        if suspect.any():
            self._find(warps, index, suspect.any(1), writers, "read", "written")
        before = readers[index]
        readers[index] = mine
        shared = (readers[index] != mine) | ((before != 0) & (before != mine))
        if shared.any():
            rows, columns = np.nonzero(shared)
            readers[index[rows], columns] = (1 << (8 * mine.itemsize)) - 1  # _SEVERAL in each byte

    def note_write(self, warps: Warps, at: np.ndarray, data: np.ndarray) -> None:
        """data: what is written, u8 [lanes, size]."""
        if warps.launch.code.proxies:
            self._note_unfenced(warps, at, data.shape[1])
        if not self.races:
            return
        size = data.shape[1]
        kind, count, index, mine = self._marks(warps, at, size)
        writers, readers = self.view(kind, count, 1), self.view(kind, count, 2)
        seen = writers[index]
        values = np.ascontiguousarray(data if warps.mask is True else data[warps.mask]).view(kind)
        suspect = (seen != 0) & (seen != mine) & (self.view(kind, count)[index] != values)
        if suspect.any():
            self._find(warps, index, suspect.any(1), writers, "written", "written")
        seen = readers[index]
        suspect = (seen != 0) & (seen != mine) & (self.view(kind, count)[index] != values)
        if suspect.any():
            self._find(warps, index, suspect.any(1), readers, "written", "read")
        writers[index] = mine

    # units that copy and multiply

    def note_unit_read(self, block: int, warp: int, address: np.ndarray) -> None:
        """A product that a warp has begun reads these bytes of the block. Raises PtxError if another warp has written
        one since all have met."""
        if self.races:
            at, mark = block * self.block_bytes + address, warp + 1
            self._refuse_others(at, self._writers[at], mark, "read by a product of", "written")
            before = self._readers[at]
            self._readers[at] = np.where((before == 0) | (before == mark), mark, _SEVERAL)
            self._touched[block] = True

    def note_unit_write(self, block: int, warp: int, address: np.ndarray) -> None:
        """A copy that a warp has begun writes these bytes of the block. Raises PtxError if another warp has touched one
        since all have met."""
        if self.races:
            at = block * self.block_bytes + address
            self._refuse_others(at, self._readers[at], warp + 1, "written by a copy of", "read")
            self._refuse_others(at, self._writers[at], warp + 1, "written by a copy of", "written")

    def _refuse_others(self, at: np.ndarray, marks: np.ndarray, mine: int, now: str, before: str) -> None:
        clash = (marks != 0) & (marks != mine)
        if clash.any():
            place = np.unravel_index(int(np.argmax(clash)), clash.shape)
            who = int(marks[place])
            by = "several warps" if who == _SEVERAL else f"warp {who - 1}"
            raise PtxError(f"race: byte {int(at[place]) % self.block_bytes} of shared memory is {now} warp {mine - 1} "
                           f"and was {before} by {by}, without a barrier between")

    def _note_unfenced(self, warps: Warps, at: np.ndarray, size: int) -> None:
        mark = warps.marks["u1"]
        if warps.mask is not True:
            at, mark = at[warps.mask], mark[warps.mask]
        self._unfenced[at[:, None] + np.arange(size)] = mark[:, None]
        self._has_unfenced[np.unique(warps.shared_base) // self.block_bytes] = True

    def fence(self, block: int, warp: int) -> None:
        """fence.proxy.async of a warp: what it has written, and what all had before they met, may be read."""
        unfenced = self._unfenced[block * self.block_bytes :][: self.block_bytes]
        unfenced[(unfenced == warp + 1) | (unfenced == _SEVERAL)] = 0

    def check_fenced(self, block: int, address: np.ndarray) -> None:
        """address: of bytes in the block's shared memory. Raises PtxError where a unit may not read them yet."""
        found = self._unfenced[block * self.block_bytes + address]
        if found.any():
            at = int(address[np.unravel_index(np.argmax(found != 0), address.shape)])
            raise PtxError(f"byte {at} of shared memory was written by threads, and is read by a unit that copies or "
                           "multiplies, without fence.proxy.async between")

    def _marks(self, warps: Warps, at: np.ndarray, size: int) -> tuple[str, int, np.ndarray, np.ndarray]:
        """Element type and number of elements of an access, index of each active lane's, the mark of its warp."""
        self._touched[np.unique(warps.shared_base) // self.block_bytes] = True
        width = min(size, 8)
        mark = warps.marks[f"u{width}"]
        index = at // size
        if warps.mask is not True:
            index, mark = index[warps.mask], mark[warps.mask]
        return f"u{width}", size // width, index, mark[:, None]

    def _find(self, warps: Warps, index: np.ndarray, suspect: np.ndarray, marks: np.ndarray, now: str,
              before: str) -> None:
        """Looks at single bytes: those of one element may be of several warps."""
        size = marks.itemsize * marks.shape[1]
        mine = np.repeat(np.array(warps.warp_of_block), 32)
        mine = (mine if warps.mask is True else mine[warps.mask]) + 1
        threads = np.arange(warps.lanes) if warps.mask is True else np.flatnonzero(warps.mask)
        found = marks.view(np.uint8).reshape(-1, size)[index]
        clash = suspect[:, None] & (found != 0) & (found != mine[:, None])
        if clash.any():
            lane, byte = (int(part[0]) for part in np.nonzero(clash))
            who = int(found[lane, byte])
            by = "several warps" if who == _SEVERAL else f"warp {who - 1}"
            place = (int(index[lane]) * size + byte) % self.block_bytes
            raise PtxError(f"race: byte {place} of shared memory is {now} by warp {int(mine[lane]) - 1} (thread "
                           f"{int(threads[lane])}) and was {before} by {by}, without a barrier between")

    def _refuse(self, at: np.ndarray, bad: np.ndarray, size: int, what: str) -> None:
        lane = int(np.flatnonzero(bad)[0])
        raise PtxError(f"access of {size} bytes in shared memory at {int(at[lane])}, {what}, thread {lane}")

