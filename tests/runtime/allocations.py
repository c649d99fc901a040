"""How often memory is allocated in the steps of an engine."""

import os
import subprocess
import sys
from pathlib import Path

_COUNTER = """
#define _GNU_SOURCE
#include <stddef.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
void *__libc_malloc(size_t); void *__libc_calloc(size_t, size_t); void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
static atomic_long count;
long num_allocations(void) { return count; }
void *malloc(size_t n) { count++; return __libc_malloc(n); }
void *calloc(size_t n, size_t m) { count++; return __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { count++; return __libc_realloc(p, n); }
void *aligned_alloc(size_t a, size_t n) { count++; return __libc_memalign(a, n); }
int posix_memalign(void **p, size_t a, size_t n) { count++; *p = __libc_memalign(a, n); return *p ? 0 : 12; }
void *mmap(void *p, size_t n, int prot, int flags, int fd, off_t offset) {
    count++;
    return (void *)syscall(SYS_mmap, p, n, prot, flags, fd, offset);
}
"""

_COUNTED_STEPS = """
import ctypes, sys
from ingot.runtime.devices import load_program
from ingot.runtime.engine_file import EngineFile
counter = ctypes.CDLL(None).num_allocations
program = load_program(EngineFile.open(sys.argv[1]), 256, 2)
blocks = [list(range(program.inputs[0].max_blocks))]
counts, position = [], 0
for number, size in enumerate(map(int, sys.argv[2:])):
    tokens, inputs = list(range(size)), program.inputs[number % 2]
    before = counter()
    inputs.clear()
    inputs.add(tokens, position, blocks, 1)
    program.launch(inputs)
    program.wait()
    program.logits()
    counts.append(counter() - before)
    position += size
print(*counts)
before = counter()
ctypes.create_string_buffer(100000)
print(counter() - before)
"""


def allocations(engine: Path, sizes: list[int], folder: Path) -> list[int]:
    """Of each step of one sequence, the step's number of tokens given; 48 tokens at most.

    Counted in the C library, so that Python's, numpy's and the kernels' allocations all show.
    """
    source, library = folder / "counter.c", folder / "counter.so"
    source.write_text(_COUNTER)
    compiler = [sys.executable, "-m", "ziglang", "cc"]
    subprocess.run([*compiler, "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    done = subprocess.run([sys.executable, "-c", _COUNTED_STEPS, str(engine), *map(str, sizes)], check=True,
                          capture_output=True, text=True, env={**os.environ, "LD_PRELOAD": str(library)})
    counts, control = done.stdout.splitlines()
    assert int(control) > 0, "the counter does not count"
    return [int(count) for count in counts.split()]
