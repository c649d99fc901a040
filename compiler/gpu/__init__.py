"""The GPU back end: Triton ahead of time, disassembly, and the interpreter. None of it needs a GPU."""
