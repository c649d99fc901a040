# mypy: allow-untyped-defs, allow-incomplete-defs
"""Small kernels for the tests of the compiler and the interpreter."""
import triton
import triton.language as tl


@triton.jit
def scaled(x, y, factor, N: tl.constexpr, BLOCK: tl.constexpr):
    """y = factor * x, float32 [N]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < N) * factor, mask=at < N)


@triton.jit
def reads_beyond(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + 4096 + at))


@triton.jit
def overflows(x, y, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) * FACTOR)


@triton.jit
def zeros_beside(x, y, BLOCK: tl.constexpr):
    """y [2, BLOCK] = x * 0, x * -0."""
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) * 0.0)
    tl.store(y + BLOCK + at, tl.load(x + at) * -0.0)


@triton.jit
def narrow(x, y, TO: tl.constexpr, BLOCK: tl.constexpr):
    """fp8 where the architecture has it, e4m3 in any case."""
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at).to(tl.float8e4nv))


@triton.jit
def product(x, w, y, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """y [M, N] float32 = x [M, K] @ w [N, K]^T in one block."""
    ms, ns, ks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(x + ms[:, None] * K + ks[None, :])
    b = tl.load(w + ns[:, None] * K + ks[None, :])
    tl.store(y + ms[:, None] * N + ns[None, :], tl.dot(a, b.T))
