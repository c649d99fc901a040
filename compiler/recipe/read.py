"""A recipe file, and the builds that it asks for."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..build_request import BuildRequest, ranks_suffix
from .fields import RECIPE, BadRecipe, check

_SHARED = ("tensor_parallel", "kv_precision", "calibrate", "calibration", "quantization_method",
           "group_size", "group_minimums", "tuning_records", "compiler", "self_test")


@dataclass(frozen=True)
class Recipe:
    """path: of the file. name: of the model. entries: the checked content."""

    path: Path
    name: str
    entries: Mapping[str, Any]

    def requests(self, folder: Path, model: str | None = None, **options: Any) -> list[BuildRequest]:
        """Every target with every precision, in the order of the file. model: a checkpoint in place of the recipe's.
        options: fields of BuildRequest that a recipe leaves open, such as dry_run, or that go before it; None is not
        said. Raises BadRecipe if two builds would write one file."""
        found: dict[Path, BuildRequest] = {}
        for number, matrix in enumerate(self.entries["builds"]):
            shared = {key: matrix.get(key, self.entries.get(key)) for key in _SHARED}
            chosen = {key: value for key, value in shared.items() if value is not None}
            for key in ("calibration", "tuning_records"):
                if key in chosen:
                    chosen[key] = self.path.parent / Path(chosen[key]).expanduser()
            limits = {**self.entries.get("limits", {}), **matrix.get("limits", {})}
            layers = {**self.entries.get("layers", {}), **matrix.get("layers", {})}
            quality = {**self.entries.get("quality", {}), **matrix.get("quality", {})}
            lora = {f"lora_{key}": value for key, value in
                    {**self.entries.get("lora", {}), **matrix.get("lora", {})}.items()}
            if "measure" in quality:
                quality["measure_quality"] = quality.pop("measure")
            asked = {name: value for name, value in options.items() if value is not None}
            for target in matrix["targets"]:
                for precision in matrix["precisions"]:
                    place = f"{_file_part(target)}{ranks_suffix(chosen.get('tensor_parallel', 1))}"
                    output = folder / f"{self.name}.{place}.{precision}.engine"
                    if output in found:
                        raise BadRecipe(f"{self.path}: builds[{number}]: {target} in {precision} is asked for twice")
                    found[output] = BuildRequest(
                        model=model or self._model(), target=target, precision=precision, output=output,
                        name=self.name, config=self.entries.get("config"), layers=layers or None,
                        **{**limits, **quality, **lora, **chosen, **asked})
        return list(found.values())

    def _model(self) -> str:
        model: str = self.entries["model"]
        if model.startswith(("/", "./", "../", "~")):
            return str(self.path.parent / Path(model).expanduser())
        return model


def read_recipe(path: Path) -> Recipe:
    """Raises BadRecipe, which names the file and the place, for anything that is not as it should be."""
    try:
        entries = yaml.load(path.read_text(), _StrictLoader)
    except OSError as error:
        raise BadRecipe(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadRecipe(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    check(entries, RECIPE, str(path))
    name = entries.get("name") or Path(entries["model"]).name
    if "/" in name:
        raise BadRecipe(f"{path}: name: expected the beginning of a file's name, got {name!r}")
    return Recipe(path, name, entries)


class _StrictLoader(yaml.SafeLoader):
    """Refuses what YAML lets pass: a key that stands twice, of which the first would be ignored."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _file_part(target: str) -> str:
    """A target as a part of a file's name: "cpu:x86-64-v3" -> "cpu-x86-64-v3"; of a user's file, what follows the
    last slash."""
    return target.rpartition("/")[2].replace(":", "-")
