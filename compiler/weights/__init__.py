"""Weight expressions: the constants of a graph as recipes over the tensors of a checkpoint."""
