"""Blocks, warps, memory: order, waiting, and what no program may do."""
from __future__ import annotations

import numpy as np
import pytest

from tests.tools.ptx.programs import lanes, run
from tools.ptx.instruction import PtxError
from tools.ptx.parser import parse

WORDS = np.arange(64, dtype=np.uint32)
STORE = "mad.wide.u32 %rd30, %r0, 4, %rd0; st.global.b32 [%rd30], %r10;"
LOOP = """mov.b32 %r10, 0; mov.u32 %r11, %r0;
    again: add.s32 %r10, %r10, %r11; setp.gt.s32 %p0, %r11, 0; sub.s32 %r11, %r11, 1; @%p0 bra again;"""
MODES = pytest.mark.parametrize("lockstep", ["warp", "block", "grid"])


@MODES
def test_lanes_part_at_a_branch_and_meet_again(lockstep: str) -> None:
    text = f"""{LOOP}
        and.b32 %r12, %r0, 1; setp.eq.s32 %p1, %r12, 0; @%p1 bra even;
        add.s32 %r10, %r10, 1000; bra.uni both;
        even: add.s32 %r10, %r10, 2000;
        both: shfl.sync.bfly.b32 %r13, %r10, 1, 31, -1; add.s32 %r10, %r10, %r13; {STORE}"""
    found = run(text, {"out": np.zeros(64, np.uint32)}, num_warps=2, lockstep=lockstep)["out"]
    sums = WORDS * (WORDS + 1) // 2 + np.where(WORDS % 2, 1000, 2000)
    assert (found == sums + sums.reshape(-1, 2)[:, ::-1].reshape(-1)).all()


def test_lanes_that_have_not_met_cannot_exchange() -> None:
    with pytest.raises(PtxError, match="wants all lanes of a warp"):
        run("setp.lt.s32 %p0, %r0, 7; @%p0 shfl.sync.bfly.b32 %r10, %r0, 1, 31, -1;", {"out": WORDS})


@MODES
@pytest.mark.parametrize("seed", range(3))
def test_what_one_warp_writes_another_reads_behind_a_barrier(lockstep: str, seed: int) -> None:
    text = f"""shl.b32 %r11, %r0, 2; mov.b32 %r12, memory; add.s32 %r12, %r12, %r11;
        st.shared.b32 [%r12], %r0; bar.sync 0;
        xor.b32 %r13, %r11, 252; mov.b32 %r12, memory; add.s32 %r12, %r12, %r13; ld.shared.b32 %r10, [%r12]; {STORE}"""
    found = run(text, {"out": np.zeros(64, np.uint32)}, num_warps=2, lockstep=lockstep, seed=seed)["out"]
    assert (found == WORDS[::-1]).all()
    with pytest.raises(PtxError, match=r"race: byte \d+ of shared memory is (read|written) by warp"):
        run(text.replace("bar.sync 0;", ""), {"out": np.zeros(64, np.uint32)}, num_warps=2, lockstep=lockstep,
            seed=seed)


def test_a_race_of_what_was_read_with_what_is_written() -> None:
    text = f"""mov.b32 %r12, memory; st.shared.b32 [%r12], 7; bar.sync 0; ld.shared.b32 %r10, [%r12];
        setp.eq.s32 %p0, %r0, 40; @%p0 st.shared.b32 [%r12], 8; {STORE}"""
    with pytest.raises(PtxError, match=r"written by warp 1 .* was read by"):
        run(text, {"out": np.zeros(64, np.uint32)}, num_warps=2, lockstep="block")
    assert (run(text.replace("%p0 st", "%p0 ld").replace("[%r12], 8", "%r13, [%r12]"),
                {"out": np.zeros(64, np.uint32)}, num_warps=2)["out"] == 7).all(), "all may write the same, and read it"


def test_warps_that_do_not_wait_for_all_others() -> None:
    text = f"""mov.b32 %r10, 5; setp.lt.u32 %p0, %r0, 32; @%p0 bra writes;
        bar.sync 1, 64; ld.shared.b32 %r10, [memory]; bra.uni end;
        writes: st.shared.b32 [memory], 9; bar.arrive 1, 64;
        end: {STORE}"""
    found = run(text, {"out": np.zeros(64, np.uint32)}, num_warps=2, lockstep="warp")["out"]
    assert found.tolist() == [5] * 32 + [9] * 32
    with pytest.raises(PtxError, match=r"block \(0, 0, 0\) waits at barrier 1, and nobody else comes"):
        run(text.replace("bar.arrive 1, 64;", ""), {"out": np.zeros(64, np.uint32)}, num_warps=2)


def test_threads_that_have_ended_are_not_waited_for() -> None:
    text = f"mov.b32 %r10, 3; setp.ge.u32 %p0, %r0, 32; @%p0 ret; bar.sync 0; {STORE}"
    assert run(text, {"out": WORDS}, num_warps=2, lockstep="warp")["out"][[0, 31, 32]].tolist() == [3, 3, 32]


@MODES
def test_blocks_count_arrivals(lockstep: str) -> None:
    """Whoever comes last is one block, in every order; with the seed it is another one."""
    text = """setp.eq.s32 %p0, %r0, 0; @!%p0 bra end;
        atom.global.gpu.acq_rel.add.u32 %r10, [%rd0], 1; setp.eq.s32 %p1, %r10, 29; @!%p1 bra end;
        st.global.b32 [%rd0+4], %r1; atom.global.add.u32 %r11, [%rd0+8], 1; end:"""
    last = set()
    for seed in range(4):
        found = run(text, {"out": np.zeros(3, np.uint32)}, (30, 1, 1), 2, lockstep=lockstep, seed=seed)["out"]
        assert found[0] == 30 and found[2] == 1
        last.add(int(found[1]))
    assert len(last) > 1


def test_copies_arrive_when_they_are_waited_for() -> None:
    text = """mad.wide.u32 %rd10, %r0, 4, %rd0; shl.b32 %r12, %r0, 2; mov.b32 %r11, memory; add.s32 %r11, %r11, %r12;
        cp.async.ca.shared.global [ %r11 + 0 ], [ %rd10 + 0 ], 0x4; cp.async.commit_group;
        setp.lt.s32 %p0, %r0, 16; selp.b32 %r13, 4, 0, %p0;
        cp.async.ca.shared.global [ %r11 + 128 ], [ %rd10 + 0 ], 0x4, %r13; cp.async.commit_group;
        cp.async.wait_group WAIT; bar.sync 0; ld.shared.b32 %r10, [%r11]; ld.shared.b32 %r14, [%r11+128];
        mad.wide.u32 %rd11, %r0, 4, %rd1; st.global.b32 [%rd11], %r10; st.global.b32 [%rd11+128], %r14;"""
    arrays = {"x": WORDS + 7, "out": np.zeros(64, np.uint32)}
    poison = 0xFFFFFFFF
    for wait, first, second in ((0, WORDS[:32] + 7, np.where(WORDS[:32] < 16, WORDS[:32] + 7, 0)),
                                (1, WORDS[:32] + 7, np.full(32, poison)),
                                (2, np.full(32, poison), np.full(32, poison))):
        found = run(text.replace("WAIT", str(wait)), arrays)["out"]
        assert (found == np.concatenate([first, second])).all(), wait


@pytest.mark.parametrize("access, message", [
    ("ld.global.b32 %r10, [%rd30+128];", r"outside of all arrays: .*byte 256 of out, which has 256\), thread 32"),
    ("ld.global.b32 %r10, [%rd30+2];", "not aligned"),
    ("ld.global.b32 %r10, [%rd1];", "outside of all arrays"),
    ("st.global.b32 [%rd30-4], %r0;", r"outside of all arrays: .*before the first array\), thread 0"),
    ("shl.b32 %r12, %r0, 4; ld.shared.b32 %r10, [%r12+256];", "outside of the block's 1024 bytes"),
    ("mov.b32 %r12, 0; ld.shared.b32 %r10, [%r12-16];", "outside of the block's 1024 bytes"),
    ("mov.b64 %rd10, 0; st.shared.b32 [%rd10-1024], %r0;", "outside of the block's 1024 bytes"),
    (".local .align 4 .b8 own[64]; mov.b64 %rd10, 0; ld.local.b32 %r10, [%rd10-16];", "local memory at -16"),
    ("st.shared.v2.b32 [memory+4], {%r0, %r0};", "not aligned"),
    ("bra L; L: again: bra again;", "no end in sight"),
    ("trap;", "trap")])
def test_what_no_program_may_do(access: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.ptx.machine._MOST_IDLE", 2)
    with pytest.raises(PtxError, match=message):
        run(f"mad.wide.u32 %rd30, %r0, 4, %rd0; mov.b64 %rd1, 64; {access}", {"out": WORDS}, num_warps=2)


def test_arrays_of_any_size_end_where_they_end() -> None:
    bytes_ = np.arange(35, dtype=np.uint8)
    text = """cvt.u64.u32 %rd10, %r0; add.s64 %rd10, %rd0, %rd10;
        ld.global.b8 %rs0, [%rd10]; st.global.b8 [%rd10+3], %rs0;"""
    assert run(text, {"x": bytes_})["x"].tolist() == [0, 1, 2, *range(32)]
    with pytest.raises(PtxError, match="byte 35 of x, which has 35"):
        run(text.replace("+3", "+4"), {"x": bytes_})


def test_unknown_instructions_are_named() -> None:
    for text, name in (("frobnicate.b32 %r10, %r0;", "frobnicate.b32"), ("add.rz.f32 %r10, %r0, %r0;", "add.rz.f32"),
                       ("ld.global.sideways.b32 %r10, [%rd0];", "sideways"),
                       ("bar.red.popc.u32 %r10, 0, %p0;", "bar.red"),
                       ("cvt.rz.f16.f32 %rs0, %r0;", ".rz"), ("mov.u32 %r10, %clock;", "%clock")):
        with pytest.raises(PtxError, match=name):
            run(text, {"out": WORDS})


def test_shuffles_votes_and_reductions() -> None:
    def got(text: str) -> list[int]:
        return lanes(text, WORDS[:32]).tolist()
    assert got("shfl.sync.idx.b32 %d, %a, 31, 31, -1;") == [31] * 32
    assert got("shfl.sync.up.b32 %d, %a, 1, 0, -1;") == [0, *range(31)]
    assert got("shfl.sync.down.b32 %d|%p0, %a, 4, 31, -1; @!%p0 mov.b32 %d, 99;") == [*range(4, 32), 99, 99, 99, 99]
    assert got("shfl.sync.idx.b32 %d, %a, 1, 0x181F, -1;") == [i // 8 * 8 + 1 for i in range(32)]
    assert got("redux.sync.max.s32 %d, %a, -1;") == [31] * 32 and got("redux.sync.add.s32 %d, %a, -1;") == [496] * 32
    assert got("setp.lt.s32 %p0, %a, 4; vote.sync.ballot.b32 %d, %p0, -1;") == [15] * 32
    assert got("shr.u32 %a, %a, 3; match.any.sync.b32 %d, %a, -1;") == [255 << i // 8 * 8 for i in range(32)]


def test_memory_of_each_thread() -> None:
    text = f""".local .align 8 .b8 depot[16]; .reg .b32 %SPL; mov.b32 %SPL, depot; mov.b64 %rd10, 0; mov.b32 %r11, 3;
        st.local.b64 [%SPL], %rd10; st.local.b32 [%SPL+8], %r0; and.b32 %r12, %r0, 1; shl.b32 %r12, %r12, 3;
        add.u32 %r12, %r12, %SPL; ld.local.b32 %r10, [%r12]; {STORE}"""
    found = run(text, {"out": np.zeros(32, np.uint32)})["out"]
    assert (found == np.where(WORDS[:32] % 2, WORDS[:32], 0)).all()
    with pytest.raises(PtxError, match="local memory at 16, which has 16 bytes"):
        run(text.replace("[%r12]", "[%r12+16]"), {"out": WORDS})


def test_tables_of_a_program() -> None:
    program = parse(""".global .align 4 .b8 t[6] = {1, 2, 0x3};
        .global .align 8 .b32 u[2] = {258, 5}; .entry k() { ret; }""")
    assert program.data == {"t": bytes([1, 2, 3, 0, 0, 0]), "u": bytes([2, 1, 0, 0, 5, 0, 0, 0])}


def test_text_that_is_none() -> None:
    for text, message in ((".version 8.8", "no .entry"), (".entry k() { bra x; }", "no label x"),
                          (".entry k() { add.s32 %r1, 1 2; }", "line 1: expected ','"),
                          (".entry k() {\n .reg .b32 %r<2>;\n mov.b32 %r2, 0; }", "line 3: %r2 is not declared"),
                          (".entry k() { ` }", "cannot read"), (".func f() {}", "'.func' is not supported"),
                          (".entry k() { ret;", "does not end")):
        with pytest.raises(PtxError, match=message):
            parse(text)


def test_scopes_of_inline_assembly() -> None:
    text = f"""mov.b32 %r10, 1; {{ .reg .b32 one; mov.b32 one, 5; bra end; add.s32 %r10, %r10, 100;
        end: add.s32 %r10, %r10, one; }}
        {{ .reg .b32 one; mov.b32 one, 6; bra end; add.s32 %r10, %r10, 100; end: add.s32 %r10, %r10, one; }} {STORE}"""
    assert run(text, {"out": np.zeros(32, np.uint32)})["out"].tolist() == [12] * 32


def handed_over(hand: str) -> str:
    """Warp 0 of each block writes, and the last block to come adds up what all have written."""
    return f"""setp.lt.u32 %p2, %r0, 32; mad.lo.s32 %r20, %r1, 32, %r0; mad.wide.u32 %rd10, %r20, 4, %rd1;
        @%p2 st.global.b32 [%rd10], %r20; {hand}
        setp.eq.s32 %p0, %r0, 32; @%p0 {{ATOM}} %r10, [%rd0], 1; @%p0 st.shared.b32 [memory], %r10;
        bar.sync 0; ld.shared.b32 %r11, [memory]; setp.eq.s32 %p1, %r11, 5; @!%p1 bra end;
        mad.wide.u32 %rd11, %r0, 4, %rd1; ld.global.b32 %r12, [%rd11]; ld.global.b32 %r13, [%rd11+512];
        add.s32 %r12, %r12, %r13; mad.wide.u32 %rd11, %r0, 4, %rd0; st.global.b32 [%rd11+4], %r12; end:"""


@MODES
def test_races_between_blocks(lockstep: str) -> None:
    arrays = {"count": np.zeros(65, np.uint32), "parts": np.zeros(192, np.uint32)}

    def sums(hand: str, atom: str) -> np.ndarray:
        text = handed_over(hand).replace("{ATOM}", atom)
        return run(text, arrays, (6, 1, 1), 2, lockstep=lockstep)["count"][1:]
    assert (sums("bar.sync 0;", "atom.global.gpu.acq_rel.add.u32") == 2 * WORDS + 128).all()
    with pytest.raises(PtxError, match=r"race: byte \d+ of parts, which has 768 is read by warp \d of block \d and was "
                                       r"written by warp 0 of block \d"):
        sums("", "atom.global.gpu.acq_rel.add.u32")
    with pytest.raises(PtxError, match=r"race: byte \d+ of parts"):
        sums("bar.sync 0;", "atom.global.gpu.relaxed.add.u32")


@pytest.mark.parametrize("first, second", [
    ("st.global.b32 [%rd0], %r0;", "ld.global.b32 %r11, [%rd0];"),
    ("ld.global.b32 %r11, [%rd0];", "st.global.b32 [%rd0], 9;"),
    ("st.global.b32 [%rd0], 1;", "st.global.b32 [%rd0], 2;")])
def test_races_within_a_block(first: str, second: str) -> None:
    text = f"setp.eq.s32 %p0, %r0, 3; setp.eq.s32 %p1, %r0, 40; @%p0 {first} BARRIER @%p1 {second}"
    run(text.replace("BARRIER", "bar.sync 0;"), {"x": np.zeros(4, np.uint32)}, num_warps=2)
    for lockstep in ("warp", "block"):
        with pytest.raises(PtxError, match=r"race: byte 0 of x.* nothing puts one behind the other"):
            run(text.replace("BARRIER", ""), {"x": np.zeros(4, np.uint32)}, num_warps=2, lockstep=lockstep)
