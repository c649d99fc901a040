"""How the model's parameters come out of the checkpoint's tensors.

transformers keeps, for every class, the renamings and conversions between the names that published checkpoints use and
those of its modules (merged experts, split projections, prefixes). Here they are followed to recipes: renamings as
such, conversions by tracing them once on shapes alone. So whatever transformers can load, this can.
"""
from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from ..ir.types import DType
from ..weights.expr import WeightExpr, tensor
from .conversion import dtype_of
from .errors import CheckpointMismatch
from .recipes import traced_recipes

Tensors = Mapping[str, tuple[tuple[int, ...], DType]]
"""What a checkpoint holds: name -> shape and type (f32, i32 or bool)."""


@dataclass
class Parameters:
    """recipes     name of a parameter or saved buffer in the model -> recipe
    shapes      name -> shape by the configuration
    unused      tensors of the checkpoint that no recipe reads
    optional    patterns of names that transformers does without
    transforms  the renamings by which names in the checkpoint are guessed for errors
    """

    recipes: dict[str, WeightExpr]
    shapes: dict[str, tuple[int, ...]]
    model_name: str
    where: str = ""
    checkpoint_names: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    optional: list[str] = field(default_factory=list)
    transforms: list[WeightTransform] = field(default_factory=list)

    def require(self, names: Iterable[str]) -> None:
        """Raises CheckpointMismatch where a parameter that the graph needs is missing or of another shape."""
        names = list(names)
        missing = [n for n in names if n not in self.recipes and not any(re.search(p, n) for p in self.optional)]
        if missing:
            raise CheckpointMismatch(self._missing_text(missing))
        for name in names:
            expr = self.recipes.get(name)
            if expr is not None and expr.shape != self.shapes[name]:
                raise CheckpointMismatch(
                    f"{self.where}: {name} of {self.model_name} has the shape {list(self.shapes[name])} by the "
                    f"configuration, the checkpoint gives {list(expr.shape)} ({expr}). "
                    "Is it the configuration of this checkpoint?")

    def _missing_text(self, missing: list[str]) -> str:
        lines = [f"{self.where} lacks {len(missing)} of the tensors that {self.model_name} needs:"]
        for name in missing[:8]:
            wanted = checkpoint_name(name, self.transforms)
            close = difflib.get_close_matches(wanted, self.unused, n=2, cutoff=0.75)
            hint = f"; unused there and similar: {', '.join(close)}" if close else ""
            lines.append(f"  {name}" + (f" (in the checkpoint: {wanted})" if wanted != name else "") + hint)
        if len(missing) > 8:
            lines.append(f"  and {len(missing) - 8} more")
        lines.append(f"The checkpoint has {len(self.checkpoint_names)} tensors, such as "
                     f"{', '.join(self.checkpoint_names[:3])}")
        return "\n".join(lines)


def checkpoint_name(name: str, transforms: Iterable[WeightTransform]) -> str:
    """What a parameter is called in a checkpoint, as far as the class's renamings tell."""
    for transform in reversed(list(transforms)):
        try:
            name = transform.reverse_transform().rename_source_key(name)[0]
        except (ValueError, NotImplementedError, AttributeError, re.error):
            continue  # a conversion without an inverse keeps the model's name
    return name.replace("\\.", ".")


def own_names(model: PreTrainedModel) -> Parameters:
    """For an import without a checkpoint: every parameter under its own name, tied ones under their source's."""
    state = state_of(model)
    recipes = {name: tensor(name, shape, dtype) for name, (shape, dtype) in state.items()}
    for target, source in _ties(model).items():
        if source in recipes:
            recipes[target] = recipes[source]
    return Parameters(recipes, {name: shape for name, (shape, _) in state.items()}, type(model).__name__)


def checkpoint_recipes(model: PreTrainedModel, tensors: Tensors, where: str,
                       transforms: list[WeightTransform] | None = None) -> Parameters:
    """Follows what transformers does when it loads a checkpoint. transforms: in place of the class's own."""
    state = state_of(model)
    known: dict[str, Any] = dict.fromkeys(state, True)
    transforms = get_model_conversion_mapping(model) if transforms is None else transforms
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    recipes: dict[str, WeightExpr] = {}
    conversions: dict[str, tuple[WeightConverter, dict[str, list[str]]]] = {}
    unused: list[str] = []
    for original in sorted(tensors, key=dot_natural_key):
        prefix = model.base_model_prefix
        renamed, pattern = rename_source_key(original, renamings, converters, prefix, known)
        if renamed not in known and original in known:
            renamed, pattern = rename_source_key(original, [], [], prefix, known)
        if renamed not in known:
            unused.append(original)
        elif pattern is None:
            recipes.setdefault(renamed, tensor(original, *tensors[original]))
        else:
            _, sources = conversions.setdefault(renamed, (deepcopy(by_pattern[pattern]), defaultdict(list)))
            sources[pattern].append(original)
    for first, (converter, sources) in conversions.items():
        recipes.update(_converted(model, first, converter, sources, tensors, where))
    return complete(model, recipes, tensors, unused, where, transforms)


def complete(model: PreTrainedModel, recipes: dict[str, WeightExpr], tensors: Tensors, unused: list[str], where: str,
             transforms: list[WeightTransform]) -> Parameters:
    """Tied parameters get the recipe of the one that is there; tensors that the class ignores count as used."""
    for target, source in _ties(model).items():
        present = [n for n in (target, source) if n in recipes]
        if len(present) == 1:
            recipes[target] = recipes[source] = recipes[present[0]]
    ignored = model._keys_to_ignore_on_load_unexpected or set()
    return Parameters(
        recipes, {name: shape for name, (shape, _) in state_of(model).items()}, type(model).__name__, where,
        list(tensors), [name for name in unused if not any(re.search(p, name) for p in ignored)],
        sorted(model._keys_to_ignore_on_load_missing or set()), transforms)


def state_of(model: PreTrainedModel) -> dict[str, tuple[tuple[int, ...], DType]]:
    """Parameters and saved buffers."""
    return {name: (tuple(value.shape), dtype_of(value.dtype)) for name, value in model.state_dict().items()}


def _ties(model: PreTrainedModel) -> dict[str, str]:
    """Parameter -> the one that it shares its values with."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def _converted(model: PreTrainedModel, first: str, converter: WeightConverter, sources: Mapping[str, list[str]],
               tensors: Tensors, where: str) -> dict[str, WeightExpr]:
    """The recipes of the parameters that one conversion makes."""
    names = [name for group in sources.values() for name in group]
    outputs: list[str] = []

    def convert(*values: torch.Tensor) -> list[torch.Tensor]:
        given = dict(zip(names, values, strict=True))
        for pattern, group in sources.items():
            for name in group:
                converter.add_tensor(first, name, pattern, lambda name=name: given[name])
        results = converter.convert(first, model=model, config=model.config)
        outputs[:] = results
        return [value[0] if isinstance(value, list) else value for value in results.values()]

    try:
        recipes = traced_recipes(convert, [tensor(name, *tensors[name]) for name in names])
    except Exception as error:
        raise CheckpointMismatch(f"{where}: {first} of {type(model).__name__} cannot be made from "
                                 f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}: {error}") from error
    return dict(zip(outputs, recipes, strict=True))
