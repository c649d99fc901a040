"""What is decided at once: the matrices of a layer that are merged, and those that are stored once."""
from __future__ import annotations

from dataclasses import dataclass

from ..ir.graph import Graph
from ..passes.matrices import Matrix, find_matrices
from ..weights.expr import WeightExpr, concat


@dataclass(frozen=True)
class Unit:
    """Matrices [N, K] of one K that get one scheme: q, k and v; gate and up; an embedding and the head that is tied to
    it; the experts of a layer, [E, N, K] each.

    choices: of experts, how many of them a token passes
    """

    matrices: tuple[Matrix, ...]
    choices: int = 1

    @property
    def role(self) -> str:
        return self.matrices[0].role

    @property
    def names(self) -> tuple[str, ...]:
        """One for each matrix."""
        return tuple(matrix.name for matrix in self.matrices)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(matrix.weight.shape for matrix in self.matrices)

    @property
    def stored(self) -> tuple[Unit, ...]:
        """What is stored as one weight each: itself, or each kind of its experts' matrices."""
        if self.role != "experts":
            return (self,)
        return tuple(Unit((matrix,), self.choices) for matrix in self.matrices)

    @property
    def weight(self) -> WeightExpr:
        """The matrices below each other, as they are merged; of one matrix of experts [E, N, K]."""
        return concat([matrix.weight for matrix in self.matrices], 0)

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(name for matrix in self.matrices for name in matrix.parameters)


def find_units(graph: Graph) -> list[Unit]:
    """Of a graph in which no scheme has been assigned yet. Routers are left out: their precision is fixed."""
    groups: dict[tuple[str, str], list[Matrix]] = {}
    for matrix in find_matrices(graph):
        first = matrix.nodes[0]
        if matrix.role == "router":
            continue
        if matrix.role == "experts":
            key = "experts", matrix.name.rpartition(".")[0]
        elif matrix.role == "linear" and len(matrix.nodes) == 1:
            key = "input", first.values[0]
        else:
            key = "alone", matrix.name
        groups.setdefault(key, []).append(matrix)
    return [Unit(tuple(members), _choices(graph, members[0])) for members in groups.values()]


def _choices(graph: Graph, matrix: Matrix) -> int:
    return int(graph.types[matrix.nodes[0].values[1]].shape[-1]) if matrix.role == "experts" else 1
