"""A machine that runs PTX, the assembly that Triton's kernels are compiled to, on numpy arrays.

parser.py       text -> Program
instruction.py  what an instruction is; the registry of what instructions do
code.py         a program made ready to run: each instruction a function
warp.py         what an instruction's function gets: registers, active lanes, memory
memory.py       global, shared and local memory: bounds, alignment, races between warps in shared memory
races.py        races in global memory
copies.py       copies that arrive when they are waited for
machine.py      blocks and warps in an order that a seed chooses
runner.py       launches of kernels, behind the interface of Triton's interpreter
rows.py, integer.py, floating.py, compare.py, move.py, convert.py, exchange.py, access.py, tensor_*.py: instructions

Instructions are those of the PTX ISA as Triton writes them; what is not known is an error.
"""
