"""How the model's parameters come out of a GGUF file's tensors.

transformers has two ways to load one, by architecture: conversions like those of other checkpoints, over GGUF's names;
and for the rest a map of names with a processor that undoes what llama.cpp's converter did to the values.
"""
from __future__ import annotations

from collections import defaultdict

import torch
from transformers import PreTrainedModel
from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, is_gguf_arch_supported
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from ..weights.expr import WeightExpr, concat, tensor
from .errors import CheckpointMismatch
from .parameters import Parameters, Tensors, checkpoint_recipes, complete, state_of
from .recipes import traced_recipes


def gguf_recipes(model: PreTrainedModel, architecture: str, tensors: Tensors, where: str) -> Parameters:
    """Raises CheckpointMismatch for a tensor that transformers' processor of this architecture cannot take."""
    if is_gguf_arch_supported(architecture):
        return checkpoint_recipes(model, tensors, where, get_gguf_conversion_mapping(architecture, model.config))
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    parts: dict[str, list[str]] = defaultdict(list)
    unused: list[str] = []
    for name in sorted(tensors):
        base = name if name in names else name.removesuffix(".weight")  # stacked experts have no suffix in the model
        if base in names:
            parts[names[base]].append(name)
        else:
            unused.append(name)
    state = state_of(model)
    recipes = {}
    for target, sources in parts.items():
        pieces = [_processed(processor, name, tensors, where) for name in sources]
        # Several tensors of one parameter are the gate and up projections of all experts, [E, N, K] each; sorted.
        recipes[target] = pieces[0] if len(pieces) == 1 else concat(pieces, 1)
    return complete(model, {n: e for n, e in recipes.items() if n in state}, tensors, unused, where, [])


def _processed(processor: TensorProcessor, name: str, tensors: Tensors, where: str) -> WeightExpr:
    """The recipe that undoes llama.cpp's changes to one tensor. Stacked experts are as the model has them."""
    leaf = tensor(name, *tensors[name])
    if len(leaf.shape) == 3:
        return leaf

    def process(values: torch.Tensor) -> list[torch.Tensor]:
        return [processor.process(weights=values, name=name, tensor_key_mapping=None, parsed_parameters=None).weights]

    try:
        return traced_recipes(process, [leaf])[0]
    except Exception as error:
        raise CheckpointMismatch(f"{where}: tensor {name} cannot be brought into transformers' form: {error}"
                                 ) from error
