"""Programs that copy, multiply and wait as Triton's do on sm_90a and sm_100a: right in every order, and found out by
some order when a wait is left out, since work beside the warps may be done as late as its wait."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ingot.plugins.gpu.floats import from_bf16, to_bf16
from ingot.runtime.devices.gpu_kernels import TensorMapType
from ingot.runtime.devices.gpu_plan import BoundTensorMap
from tools.ptx.code import Code
from tools.ptx.instruction import PtxError
from tools.ptx.machine import Launch, Options
from tools.ptx.memory import GlobalMemory
from tools.ptx.parser import parse

BARRIER, SECOND, PLACE = 16384, 16392, 16400
SEEDS = range(12)
RNG = np.random.default_rng(9)
A, B = (to_bf16(RNG.standard_normal((64, 64)).astype(np.float32)) for _ in range(2))
WANTED = from_bf16(A).astype(np.float64) @ from_bf16(B).astype(np.float64).T


def run(body: str, seed: int) -> np.ndarray:
    """128 threads, 32 words of the result for each. %p0: the first thread; %rd1, %rd2: tensor maps of A and B, whose
    boxes are the whole matrices; %rd0: the thread's part of the result, which the registers %d0 to %d31 end in."""
    text = f""".version 8.8
        .target sm_90a
        .address_size 64
        .extern .shared .align 16 .b8 memory[];
        .visible .entry kernel(.param .align 64 .b8 a[128], .param .align 64 .b8 b[128], .param .u64 out) .reqntid 128
        {{ .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b32 %d<32>; .reg .b64 %rd<20>;
        mov.u32 %r0, %tid.x; setp.eq.s32 %p0, %r0, 0; setp.lt.s32 %p3, %r0, 32;
        mov.b32 %r1, a; cvt.u64.u32 %rd1, %r1; cvta.param.u64 %rd1, %rd1;
        mov.b32 %r1, b; cvt.u64.u32 %rd2, %r1; cvta.param.u64 %rd2, %rd2;
        ld.param.b64 %rd0, [out]; mad.wide.u32 %rd0, %r0, 128, %rd0;
        {body}
        {"".join(f"st.global.b32 [%rd0+{4 * i}], %d{i};" for i in range(32))}
        ret; }}"""
    arrays = {"a": A, "b": B, "out": np.zeros((128, 32), np.float32)}
    memory = GlobalMemory(arrays)
    kind = TensorMapType("bf16", (64, 64), (64, 64), 3, 2, 10, False)
    params = {name: BoundTensorMap(memory.addresses[name], kind, (64, 64), 64) for name in "ab"}
    Launch(Code(parse(text)), memory, params | {"out": memory.addresses["out"]}, (1, 1, 1), 128, 17000,
           Options(seed=seed)).run()
    return memory.arrays()["out"]


def wait(barrier: int, parity: int = 0) -> str:
    """Without line breaks: parts of programs are left out by lines."""
    name = f"wait{barrier}x{parity}"
    return (f"{name}: mbarrier.try_wait.parity.shared::cta.b64 %p1, [{barrier}], {parity}; @!%p1 bra.uni {name};")


COPY = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
FETCH = f"""@%p0 mbarrier.init.shared::cta.b64 [{BARRIER}], 1;
    @%p0 mbarrier.init.shared::cta.b64 [{SECOND}], 1;
    bar.sync 0;
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [{BARRIER}], 16384;
    @%p0 {COPY} [memory], [%rd1, {{0, 0}}], [{BARRIER}];
    @%p0 {COPY} [memory+8192], [%rd2, {{0, 0}}], [{BARRIER}];
    {wait(BARRIER)}
    """
STRIDES = 64 << 32 | 1 << 16  # 8 lines of 128 bytes, in units of 16
SUMS = "{" + ", ".join(f"%d{i}" for i in range(32)) + "}"
WGMMA = FETCH + "wgmma.fence.sync.aligned;\n" + "".join(
    f"""mov.b64 %rd3, {1 << 62 | STRIDES | 2 * step};
    mov.b64 %rd4, {1 << 62 | STRIDES | 512 + 2 * step};
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {SUMS}, %rd3, %rd4, {int(step > 0)}, 1, 1, 0, 0;
    """ for step in range(4)) + """wgmma.commit_group.sync.aligned;
    // spoil
    wgmma.wait_group.sync.aligned 0;
    """
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
IDESC = 1 << 4 | 1 << 7 | 1 << 10 | 8 << 17 | 4 << 24
ZEROS = "{" + ", ".join(["%r9"] * 32) + "}"
TCGEN05 = f"""@%p3 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{PLACE}], 64;
    bar.sync 0; ld.shared.b32 %r4, [{PLACE}];
    shl.b32 %r5, %r0, 16; and.b32 %r5, %r5, {96 << 16}; add.s32 %r5, %r4, %r5;
    mov.b32 %r9, 0f3F800000;
    tcgen05.st.sync.aligned.16x32bx2.x32.b32 [%r5], 32, {ZEROS};
    tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    {FETCH}mov.b32 %r6, {IDESC}; mov.pred %p2, -1;
    """ + "".join(
    f"""mov.b64 %rd3, {2 << 61 | 1 << 46 | STRIDES | 2 * step};
    mov.b64 %rd4, {2 << 61 | 1 << 46 | STRIDES | 512 + 2 * step};
    @%p0 tcgen05.mma.cta_group::1.kind::f16 [%r4+0], %rd3, %rd4, %r6, %p2;
    """ for step in range(4)) + f"""@%p0 {COMMIT} [{SECOND}];
    // spoil
    {wait(SECOND)}
    tcgen05.ld.sync.aligned.16x32bx2.x32.b32 {SUMS}, [%r5], 32;
    tcgen05.wait::ld.sync.aligned;
    bar.sync 0;
    @%p3 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 64;
    """


def wgmma_result(out: np.ndarray) -> np.ndarray:
    """Warp, four rows of two halves, and pairs of columns: back to a matrix."""
    return out.reshape(4, 8, 4, 8, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(64, 64)


def tcgen05_result(out: np.ndarray) -> np.ndarray:
    """Sixteen rows of a warp, their columns in two halves; the sums began with one."""
    return out.reshape(4, 2, 16, 32).transpose(0, 2, 1, 3).reshape(64, 64) - 1


PROGRAMS = [("wgmma", WGMMA, wgmma_result), ("tcgen05", TCGEN05, tcgen05_result)]


@pytest.mark.parametrize(("name", "text", "matrix"), PROGRAMS, ids=[name for name, _, _ in PROGRAMS])
def test_every_order_gives_the_product(name: str, text: str, matrix: Callable[[np.ndarray], np.ndarray]) -> None:
    for seed in SEEDS:
        np.testing.assert_allclose(matrix(run(text, seed)), WANTED, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("name", "without"), [
    ("wgmma", "wgmma.commit_group"), ("wgmma", "wgmma.wait_group"), ("wgmma", f"wait{BARRIER}"),
    ("tcgen05", "tcgen05.commit"), ("tcgen05", f"wait{BARRIER}"), ("tcgen05", f"wait{SECOND}"),
    ("tcgen05", "tcgen05.wait::st"), ("wgmma", "expect_tx"), ("tcgen05", f"init.shared::cta.b64 [{SECOND}]")])
def test_what_is_left_out_shows(name: str, without: str) -> None:
    """Some order gives a wrong result, never ends, or does what nobody may do."""
    text, matrix = next((text, matrix) for found, text, matrix in PROGRAMS if found == name)
    lines = [line for line in text.splitlines() if without not in line]
    assert len(lines) == len(text.splitlines()) - 1
    assert not all(is_right("\n".join(lines), matrix, seed) for seed in SEEDS)


@pytest.mark.parametrize(("name", "text", "matrix"), PROGRAMS, ids=[name for name, _, _ in PROGRAMS])
def test_what_is_overwritten_before_the_wait_shows(name: str, text: str,
                                                   matrix: Callable[[np.ndarray], np.ndarray]) -> None:
    """Products read shared memory as late as they may."""
    spoiled = text.replace("// spoil", "shl.b32 %r8, %r0, 6; st.shared.b32 [%r8], 1077952576;")
    assert not all(is_right(spoiled, matrix, seed) for seed in SEEDS)


def is_right(text: str, matrix: Callable[[np.ndarray], np.ndarray], seed: int) -> bool:
    try:
        return bool(np.allclose(matrix(run(text, seed)), WANTED, rtol=1e-5, atol=1e-4))
    except PtxError:
        return False


def test_one_lane_is_elected() -> None:
    """The first of the members, of which all get the number."""
    text = "elect.sync %r2|%p1, 65520; selp.b32 %d1, 1, 0, %p1; mov.b32 %d0, %r2;"
    out = run(text + "".join(f"mov.b32 %d{i}, 0;" for i in range(2, 32)), 0).view(np.uint32)
    assert (out[:, 0] == 4).all()
    assert np.array_equal(np.flatnonzero(out[:, 1]), [4, 36, 68, 100])


def test_a_barrier_of_all_warps_and_its_phases() -> None:
    """Each warp adds up what the others have written before the barrier's phase ended; then a second time."""
    text = f"""@%p0 mbarrier.init.shared::cta.b64 [{BARRIER}], 128;
        bar.sync 0; shl.b32 %r2, %r0, 2; xor.b32 %r3, %r2, 256;
        st.shared.b32 [%r2], %r0;
        mbarrier.arrive.shared::cta.b64 %rd5, [{BARRIER}];
        {wait(BARRIER)}
        ld.shared.b32 %d0, [%r3];
        mbarrier.arrive.shared::cta.b64 _, [{BARRIER}];
        {wait(BARRIER, 1)}
        add.s32 %r4, %r0, 1000; st.shared.b32 [%r2], %r4;
        mbarrier.arrive.shared::cta.b64 %rd6, [{BARRIER}];
        again: mbarrier.test_wait.shared::cta.b64 %p1, [{BARRIER}], %rd6; @!%p1 bra.uni again;
        ld.shared.b32 %d1, [%r3];""" + "".join(f"mov.b32 %d{i}, 0;" for i in range(2, 32))
    def fails(text: str, seed: int) -> bool:
        partner = np.arange(128) ^ 64
        try:
            out = run(text, seed).view(np.uint32)
        except PtxError:
            return True
        return not (np.array_equal(out[:, 0], partner) and np.array_equal(out[:, 1], partner + 1000))
    assert not any(fails(text, seed) for seed in SEEDS)
    assert any(fails(text.replace(wait(BARRIER, 1), ""), seed) for seed in SEEDS)


def test_races_show_beside_copies() -> None:
    """Barriers that copies arrive at order no threads; one that threads arrive at may, and races are not looked for."""
    text = FETCH + """st.shared.b32 [memory+64], %r0; ld.shared.b32 %d0, [memory+64];""" + "".join(
        f"mov.b32 %d{i}, 0;" for i in range(1, 32))
    with pytest.raises(PtxError, match=r"race: byte 6[4-7] of shared memory"):
        run(text, 0)
    run(text + f"@%p0 mbarrier.arrive.shared::cta.b64 _, [{SECOND}];", 0)


@pytest.mark.parametrize(("text", "told"), [
    (WGMMA + "setp.eq.s32 %p2, %r0, 127; @%p2 st.shared.b32 [memory+8192], 0;", r"written by warp 3 .* read by"),
    (FETCH + f"""ld.shared.b32 %d0, [memory+128];
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [{SECOND}], 8192;
        // between
        @%p0 {COPY} [memory], [%rd1, {{0, 0}}], [{SECOND}];
        {wait(SECOND)}
        """, r"written by a copy of warp 0 and was read by")])
def test_races_with_copies_and_products(text: str, told: str) -> None:
    """What a product of another warp may still read; what another warp may still read that a copy overwrites."""
    with pytest.raises(PtxError, match=told):
        for seed in SEEDS:
            run(text, seed)
    for seed in SEEDS:
        run(text.replace("// between", "bar.sync 0;").replace("setp.eq.s32 %p2", "bar.sync 0; setp.eq.s32 %p2"), seed)


def test_a_copy_to_global_memory_is_done_at_its_wait() -> None:
    """The result's tensor map is that of A: what is written there is read back behind the wait."""
    text = f"""@%p0 mbarrier.init.shared::cta.b64 [{BARRIER}], 1; shl.b32 %r2, %r0, 6;
        {"".join(f"st.shared.b32 [%r2+{4 * i}], 7;" for i in range(16))}
        bar.sync 0; fence.proxy.async.shared::cta;
        @%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {{0, 32}}], [memory];
        @%p0 cp.async.bulk.commit_group;
        @%p0 cp.async.bulk.wait_group 0;
        bar.sync 0;
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [{BARRIER}], 8192;
        @%p0 {COPY} [memory+8192], [%rd1, {{0, 0}}], [{BARRIER}];
        {wait(BARRIER)}
        """ + "".join(f"ld.shared.b32 %d{i}, [%r2+{8192 + 4 * i}];" for i in range(16)) + "".join(
        f"mov.b32 %d{i}, 0;" for i in range(16, 32))

    def rows(text: str, seed: int) -> np.ndarray:
        return run(text, seed)[:, :16].view(np.uint32).reshape(64, 32)
    for seed in SEEDS:
        assert (rows(text, seed)[32:] == 7).all() and not (rows(text, seed)[:32] == 7).any()
    without = text.replace("@%p0 cp.async.bulk.wait_group 0;", "")
    assert any((rows(without, seed)[32:] != 7).any() for seed in SEEDS)


FENCE = "fence.proxy.async.shared::cta;"


@pytest.mark.parametrize(("text", "is_right"), [
    (f"{FENCE} bar.sync 0;", True), (f"bar.sync 0; {FENCE}", True), (f"bar.sync 0; @%p0 {FENCE}", True),
    ("bar.sync 0;", False), (f"@%p0 {FENCE} bar.sync 0;", False), (f"bar.sync 0; @!%p3 {FENCE}", True)])
def test_fences_between_threads_and_the_units_that_read_what_they_write(text: str, is_right: bool) -> None:
    """A fence of each who writes, or of anybody behind a barrier."""
    text = f"""shl.b32 %r2, %r0, 6; {"".join(f"st.shared.b32 [%r2+{4 * i}], 0;" for i in range(16))} {text}
        mov.b64 %rd3, {1 << 62 | STRIDES}; {"".join(f"mov.b32 %d{i}, 0;" for i in range(32))}
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {SUMS}, %rd3, %rd3, 1, 1, 1, 0, 0;
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;"""
    if is_right:
        assert (run(text, 0) == 0).all()
    else:
        with pytest.raises(PtxError, match=r"byte \d+ of shared memory was written by threads"):
            run(text, 0)


@pytest.mark.parametrize(("text", "told"), [
    ("setp.lt.s32 %p1, %r0, 5; @%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%d0}, [0];",
     "some lanes of a warp are not active"),
    ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%d0, %d1}, [0];", "only m8n8 of b16"),
    ("tcgen05.cp.cta_group::1.128x256b [%r0], %rd0;", "unknown instruction tcgen05.cp"),
    ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [0];", "not in one piece"),
    (f"@%p0 mbarrier.arrive.shared::cta.b64 _, [{BARRIER}];", "there is no barrier at 16384"),
    (f"@%p0 {COPY} [memory], [%rd0, {{0, 0}}], [{BARRIER}];", "no tensor map"),
])
def test_what_no_program_may_do(text: str, told: str) -> None:
    with pytest.raises(PtxError, match=told):
        run(f"@%p0 mbarrier.init.shared::cta.b64 [{SECOND}], 1; {text}", 0)
