"""A configuration whose weights exceed the machine's memory is imported all the same."""
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ingot.compiler.importer.importer import import_config


def test_experts_larger_than_memory_are_never_allocated() -> None:
    config = CONFIG_MAPPING["mixtral"](
        num_hidden_layers=1, hidden_size=16384, intermediate_size=65536, num_local_experts=512, vocab_size=512,
        num_attention_heads=128, num_key_value_heads=8)  # 2 TB of gate and up projections in float32
    graph = import_config(config).graph
    experts = [node for node in graph.nodes if node.op == "expert_linear"]
    assert [graph.types[node.values[2]].shape for node in experts] == [(512, 131072, 16384), (512, 16384, 65536)]
