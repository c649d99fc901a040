"""The size of a model as its graph tells it: what clients and gateways ask servers for."""
from __future__ import annotations

from .ir.graph import Graph


def model_shape(imported: Graph) -> dict[str, int]:
    """hidden_size: the width of the token embedding; num_layers: attentions; num_heads: of queries, the most that an
    attention has. Left out where the model has nothing of the kind."""
    embeddings = [node for node in imported.nodes if node.op == "embedding"]
    attentions = [node for node in imported.nodes if node.op == "attention"]
    found: dict[str, int] = {}
    if embeddings:  # positions have one too, with fewer rows
        largest = max(embeddings, key=lambda node: int(imported.types[node.values[0]].shape[0]))
        found["hidden_size"] = int(imported.types[largest.outputs[0]].shape[-1])
    if attentions:
        found["num_layers"] = len(attentions)
        found["num_heads"] = max(int(imported.types[node.values[0]].shape[1]) for node in attentions)
    return found
