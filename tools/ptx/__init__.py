"""A machine that runs PTX, the assembly that Triton's kernels are compiled to, on numpy arrays.

parser.py      text -> Program
instruction.py what an instruction is; the registry of what instructions do
warp.py        what an instruction's function gets: registers, active lanes, memory
memory.py      global and shared memory, bounds and races
machine.py     blocks and warps in an order that a seed chooses
integer.py, floating.py, convert.py, exchange.py, access.py, tensor_*.py   the instructions
"""
