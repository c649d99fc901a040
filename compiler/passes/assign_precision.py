"""Write the scheme of every matrix into the graph."""
from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES, with_format
from ingot.runtime.errors import RequestError

from ..ir.graph import Graph
from ..precision import Precision
from ..weights.carried import carried
from ..weights.expr import WeightExpr
from .keep_exceptions import keep_exceptions
from .matrices import Matrix, find_matrices

# Schemes that take the place of a precision's own where a checkpoint holds its numbers in them.
_AS_STORED = {"int8g32": ("int8",)}


def assign_precision(graph: Graph, precision: Precision, stored: Mapping[str, str] | None = None) -> Graph:
    """linear, expert_linear and embedding nodes with constant weights get attrs["scheme"].

    An embedding that is the head's own weight takes the head's scheme, so that the two are stored once.
    stored: tensor of the checkpoint -> the scheme that holds its numbers as they are; on GPUs the format of int4.
    Raises RequestError for a pattern of precision.layers that no layer matches.
    """
    matrices = find_matrices(graph)
    _require_known(precision, matrices)
    schemes = {output: _as_stored(precision.layer_scheme(matrix.names, matrix.role), matrix.weight, stored or {})
               for matrix in matrices for output in matrix.outputs}
    schemes = keep_exceptions(matrices, schemes, precision, stored or {})
    return graph.rebuilt([node.with_attrs(scheme=schemes[node.outputs[0]]) if node.outputs[0] in schemes else node
                          for node in graph.nodes])


def _as_stored(scheme: str, weight: WeightExpr, stored: Mapping[str, str]) -> str:
    if scheme == "fp8" and carried(weight, "fp8") is None and carried(weight, "fp8_block") is not None:
        return "fp8_block"
    found = {stored[name] for name in weight.tensor_names() if name in stored}
    if scheme in GPU_SCHEMES and GPU_SCHEMES[scheme].weights.is_int4:
        return with_format(scheme, found.pop()) if len(found) == 1 else scheme
    return found.pop() if len(found) == 1 and found <= set(_AS_STORED.get(scheme, ())) else scheme


def _require_known(precision: Precision, matrices: Sequence[Matrix]) -> None:
    names = [name for matrix in matrices for name in matrix.names]
    for rule in precision.layers:
        if not any(fnmatchcase(name, rule.pattern) for name in names):
            near = difflib.get_close_matches(rule.pattern, names, n=3, cutoff=0.4) or names[:3]
            raise RequestError(f"layers: no layer of the model matches {rule.pattern!r}. Near it: {', '.join(near)}.\n"
                               f"  A pattern may hold * and ?; the model has {len(matrices)} layers with weights")
