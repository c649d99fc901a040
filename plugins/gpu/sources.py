"""The identity of a kernel's source: the text of its module and of every module of kernels that it imports."""
from __future__ import annotations

import ast
import hashlib
import importlib.util
from functools import cache
from pathlib import Path

_ROOT = "ingot.plugins."


@cache
def source_digest(module: str, text: str = "") -> str:
    """SHA-256 over the texts of the module and of the modules that it imports from its own package or from
    ingot.plugins, by name. text: of a generated module, which lies in no file. No module is run."""
    texts = {module: text} if text else {}
    pending = _imported(ast.parse(text), module, False) if text else [module]
    while pending:
        name = pending.pop()
        if name in texts:
            continue
        path = _path(name)
        if path is None:
            continue
        texts[name] = path.read_text()
        pending += _imported(ast.parse(texts[name]), name, path.name == "__init__.py")
    digest = hashlib.sha256()
    for name in sorted(texts):
        digest.update(f"{name}\0{len(texts[name].encode())}\0{texts[name]}".encode())
    return digest.hexdigest()


def _path(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _imported(tree: ast.Module, module: str, is_package: bool) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith(_ROOT)]
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = ".".join(parts[:len(parts) - node.level + is_package]) if node.level else ""
            name = ".".join(part for part in (base, node.module) if part)
            if node.level or f"{name}.".startswith(_ROOT):
                if node.module:
                    found.append(name)
                else:  # from . import a, b
                    found += [f"{name}.{alias.name}" for alias in node.names]
    return found
