"""Import: configuration and tensor names in, graph of tensor operators out. Pure: the same input, the same graph."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.quantized import Quantized, read_quantized
from ..ir.graph import Graph
from ..ir.types import DType
from ..ir.verify import verify
from ..weights.expr import WeightExpr, substitute
from .errors import ImportRefused

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from .parameters import Parameters

_INTEGERS = ("I64", "I32", "I16", "I8", "U8")


@dataclass(frozen=True)
class ImportedModel:
    """graph: inputs token_ids i32[T] and positions i32[T], output logits f32[T, V].

    warnings: what a user should know, such as tensors of the checkpoint that the model has no use for.
    """

    graph: Graph
    config: PretrainedConfig
    warnings: list[str] = field(default_factory=list)


def import_model(checkpoint: Checkpoint, max_seq_len: int | None = None) -> ImportedModel:
    """max_seq_len: the longest sequence that will be served, for models that compute with it (see Limits); the
    configuration's own limit if it is not given.

    Raises ImportRefused for a model that cannot become an engine, CheckpointMismatch for tensors that do not fit,
    CheckpointError for a malformed checkpoint.
    """
    return _import(checkpoint.config, checkpoint, max_seq_len)


def import_config(config: PretrainedConfig, max_seq_len: int | None = None) -> ImportedModel:
    """A dry run without a checkpoint: each parameter is a tensor of its own name."""
    return _import(config, None, max_seq_len)


def element_type(stored: str) -> DType:
    """What a tensor enters a weight expression as, by the type that the checkpoint stores."""
    if stored == "BOOL":
        return DType.BOOL
    return DType.I32 if stored in _INTEGERS else DType.F32


def load_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """transformers' own model in float32 with the weights that the recipes give: how quantized checkpoints are run.

    Raises as import_model does.
    """
    import torch

    from ..weights.evaluate import evaluate
    from .export import empty_model
    model = empty_model(checkpoint.config)
    parameters = _parameters(model, checkpoint)
    parameters.require(name for name, _ in model.named_parameters())
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name in parameters.recipes:
                value.copy_(torch.tensor(evaluate(parameters.recipes[name], checkpoint)))
    return model.eval()


def load_without_memory(checkpoint: Checkpoint) -> tuple[PreTrainedModel, dict[str, WeightExpr]]:
    """(the model with parameters on the meta device, name of a parameter or saved buffer -> recipe).

    Raises as import_model does.
    """
    from .export import model_without_memory
    model = model_without_memory(checkpoint.config)
    parameters = _parameters(model, checkpoint)
    parameters.require(name for name, _ in model.named_parameters())
    return model.eval(), parameters.recipes


def _import(config: PretrainedConfig, checkpoint: Checkpoint | None, max_seq_len: int | None) -> ImportedModel:
    if getattr(config, "is_encoder_decoder", False):
        raise ImportRefused(f"{config.model_type} is an encoder-decoder model; an engine holds a decoder alone")
    from .convert import convert
    from .export import export
    from .token_axis import check_token_axis
    limit = max_seq_len or getattr(config.get_text_config(), "max_position_embeddings", None)
    exported = export(config, limit)
    parameters = _parameters(exported.model, checkpoint)
    graph, warnings = convert(exported, parameters, limit)
    check_token_axis(verify(graph))
    if parameters.unused:
        shown = ", ".join(parameters.unused[:5])
        warnings.append(f"{len(parameters.unused)} tensors of the checkpoint are not used: {shown}"
                        + (", …" if len(parameters.unused) > 5 else ""))
    return ImportedModel(graph, config, warnings)


def _parameters(model: PreTrainedModel, checkpoint: Checkpoint | None) -> Parameters:
    from .gguf_parameters import gguf_recipes
    from .parameters import checkpoint_recipes, own_names
    if checkpoint is None:
        return own_names(model)
    quantized = read_quantized(checkpoint) or Quantized("")
    tensors = {name: (checkpoint.shape(name), element_type(checkpoint.dtype(name))) for name in checkpoint.names()
               if name not in quantized.consumed}
    # The importer sees weights as if they were not quantized; their recipes take the place of these tensors afterwards.
    made = {name: weight.expr for name, weight in quantized.weights.items()}
    tensors |= {name: (expr.shape, DType.F32) for name, expr in made.items()}
    architecture = checkpoint.gguf_architecture
    if architecture is not None:
        return gguf_recipes(model, architecture, tensors, str(checkpoint.path))
    parameters = checkpoint_recipes(model, tensors, str(checkpoint.path))
    parameters.recipes = {name: substitute(expr, made) for name, expr in parameters.recipes.items()}
    return parameters
