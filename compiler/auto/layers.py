"""A choice as the `layers` of a recipe: few patterns, which can be read and edited."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ..precision import Precision, find_precision, with_layers
from ..targets import Target
from .units import Unit


def precision_names(target: Target) -> dict[str, str]:
    """Scheme of linear layers -> the precision of the target that gives it, the first of several."""
    found: dict[str, str] = {}
    for name in target.precisions:
        found.setdefault(find_precision(name, target.gpu).scheme("linear"), name)
    return found


def layers_of(units: Sequence[Unit], schemes: Sequence[str], base: Precision, target: Target,
              pinned: Mapping[str, str]) -> dict[str, str]:
    """Pattern -> precision, so that an engine in the base precision has these schemes; only what differs from it.

    Layers of one kind ("*.down_proj") are one pattern where most of them have the same. pinned: the user's own layers,
    which stay.
    """
    known = precision_names(target)
    matrices = [(matrix, scheme) for unit, scheme in zip(units, schemes, strict=True) for matrix in unit.matrices]
    kinds: dict[str, list[str]] = {}
    for matrix, scheme in matrices:
        kinds.setdefault(matrix.name.rpartition(".")[2], []).append(scheme)
    found = dict(pinned)
    for kind, of_kind in kinds.items():
        common, count = Counter(of_kind).most_common(1)[0]
        if count > 1 and common != base.scheme("linear") and common in known:
            found.setdefault(f"*.{kind}", known[common])
    for matrix, scheme in matrices:
        if with_layers(base, found, target.gpu).layer_scheme(matrix.names, matrix.role) != scheme:
            found[matrix.name] = known[scheme]
    return found


def recipe_text(entries: Mapping[str, Any], comment: Sequence[str]) -> str:
    """YAML that `ingot build --recipe` reads."""
    head = "".join(f"# {line}\n" for line in comment)
    return head + yaml.safe_dump(dict(entries), sort_keys=False, width=120)
