"""Kernels of the CPU target that work along the last dimension: softmax, cumsum, topk, sort, argmax, gather, scatter.

rows: the product of all other dimensions, "T", "L", with a factor "9*T", or a number. Rows lie without gaps.
dtype: "f32" | "i32". size_bytes: of an element that is only moved, 1, 2 or 4.
"""
from __future__ import annotations

from ..constants import Rows, rows_in_c, symbol
from ..kernel import CpuKernel

_TYPES = {"f32": "INGOT_ORDER_F32", "i32": "INGOT_ORDER_I32"}
_C_TYPES = {"f32": "float", "i32": "int32_t"}


def softmax(rows: Rows, width: int) -> CpuKernel:
    """args: x f32 [rows, width], y. y may be x."""
    return CpuKernel(symbol("softmax", rows, width), "select/rows.h", _each_row(
        rows, f"ingot_softmax_row((const float *)args[0] + row * {width}, (float *)args[1] + row * {width}, {width});"))


def cumsum(rows: Rows, width: int, dtype: str = "f32") -> CpuKernel:
    """args: x [rows, width], y: the running sums. y may be x."""
    x, y = (f"({_C_TYPES[dtype]} *)args[{i}] + row * {width}" for i in (0, 1))
    return CpuKernel(symbol("cumsum", dtype, rows, width), "select/rows.h",
                     _each_row(rows, f"ingot_cumsum_row_{dtype}({x}, {y}, {width});"))


def argmax(rows: Rows, width: int, dtype: str = "f32") -> CpuKernel:
    """args: x [rows, width], y i32 [rows]: the first of the largest; NaN counts as the largest."""
    return CpuKernel(symbol("argmax", dtype, rows, width), "select/order.h", _each_row(
        rows, f"((int32_t *)args[1])[row] = ingot_argmax_row((const int32_t *)args[0] + row * {width}, {width}, "
              f"{_TYPES[dtype]});"))


def topk(rows: Rows, width: int, k: int, largest: bool = True, dtype: str = "f32") -> CpuKernel:
    """args: x [rows, width], values [rows, k], indices i32 [rows, k]: the best first, of equals the lower index first.

    NaN counts as larger than infinity. No output may be x.
    """
    assert 1 <= k <= width, (k, width)
    return CpuKernel(
        symbol("topk" if largest else "topk_smallest", dtype, rows, width, k), "select/order.h",
        f"ingot_order_rows({rows_in_c(rows)}, args[0], args[1], args[2], {width}, {k}, {_TYPES[dtype]}, "
        f"{int(largest)}, worker, num_workers);")


def sort(rows: Rows, width: int, descending: bool = False, dtype: str = "f32") -> CpuKernel:
    """args: x [rows, width], values [rows, width], indices i32 [rows, width]. Stable. No output may be x."""
    return topk(rows, width, width, descending, dtype)


def gather(rows: Rows, width: int, count: int, size_bytes: int = 4) -> CpuKernel:
    """args: x [rows, width], index i32 [rows, count], y [rows, count]: y[r, i] = x[r, index[r, i]]."""
    return _gather("gather", rows, width, count, size_bytes, count)


def take(rows: Rows, width: int, count: int, size_bytes: int = 4) -> CpuKernel:
    """args: x [rows, width], index i32 [count], y [rows, count]: y[r, i] = x[r, index[i]]."""
    return _gather("take", rows, width, count, size_bytes, 0)


def scatter(rows: Rows, width: int, count: int, source_width: int, size_bytes: int = 4) -> CpuKernel:
    """args: x [rows, width], index i32 [rows, count], source [rows, source_width], y [rows, width].

    y is x with y[r, index[r, i]] = source[r, i] for i < count, in this order. source_width 0: source is one element.
    y may be x.
    """
    assert source_width == 0 or source_width >= count, (source_width, count)
    return CpuKernel(
        symbol("scatter", rows, width, count, source_width, f"b{size_bytes}"), "select/gather.h",
        f"ingot_scatter_rows({rows_in_c(rows)}, args[0], args[1], args[2], args[3], {width}, {count}, {source_width}, "
        f"{int(source_width > 0)}, {size_bytes}, worker, num_workers);")


def gather_rows(rows: Rows, width: int, size_bytes: int = 4, x_stride: int = 0) -> CpuKernel:
    """args: x [.., width] with rows x_stride elements apart (0: no gap), index i32 [rows], y [rows, width].

    y[i] = x[index[i]]; with rows "L" and the step's logit_rows: the tokens whose logits are asked for.
    """
    return CpuKernel(
        symbol("gather_rows", rows, width, f"b{size_bytes}", f"x{x_stride}" if x_stride else ""), "select/gather.h",
        f"ingot_gather_rows({rows_in_c(rows)}, args[0], args[1], args[2], {width * size_bytes}, "
        f"{(x_stride or width) * size_bytes}, worker, num_workers);")


def _gather(name: str, rows: Rows, width: int, count: int, size_bytes: int, index_stride: int) -> CpuKernel:
    return CpuKernel(
        symbol(name, rows, width, count, f"b{size_bytes}"), "select/gather.h",
        f"ingot_gather_elements({rows_in_c(rows)}, args[0], args[1], args[2], {width}, {count}, {index_stride}, "
        f"{size_bytes}, worker, num_workers);")


def _each_row(rows: Rows, statement: str) -> str:
    return (f"int begin, end;\ningot_split({rows_in_c(rows)}, worker, num_workers, &begin, &end);\n"
            f"for (ptrdiff_t row = begin; row < end; row++) {{\n    {statement}\n}}")
