"""What an engine was made from, as statements that other tools read: SLSA provenance and an SBOM of the toolchain.

All of it comes from the manifest, whose SHA-256 is the engine's hash: the same engine has the same statements.
"""

from __future__ import annotations

import re
from typing import Any

from .attestation import PROVENANCE_TYPE, STATEMENT_TYPE

SBOM_TYPE = "https://cyclonedx.org/bom"
_VERSION = re.compile(r"(?:(?P<name>[A-Za-z][\w.-]*) )?(?P<version>\d[\w.+-]*)(?P<rest>.*)")
_PACKAGES = {"zig": "ziglang"}
"""Tools whose package has another name."""


def statements(manifest: dict[str, Any], engine_hash: str) -> list[dict[str, Any]]:
    """in-toto statements, unsigned: provenance (SLSA 1.0) and SBOM (CycloneDX 1.6)."""
    subject = [{"name": f"{manifest['model']['name']}.{manifest['target']['name']}.{manifest['precision']}.engine",
                "digest": {"sha256": engine_hash}}]
    return [{"_type": STATEMENT_TYPE, "subject": subject, "predicateType": kind, "predicate": predicate}
            for kind, predicate in ((PROVENANCE_TYPE, provenance(manifest)), (SBOM_TYPE, sbom(manifest)))]


def provenance(manifest: dict[str, Any]) -> dict[str, Any]:
    model = manifest["model"]
    builder = f"pkg:pypi/ingot-llm@{manifest['ingot_version']}"
    checkpoint: dict[str, Any] = {"name": model["name"], "annotations": {
        "architecture": model["architecture"], "config_sha256": model["config_sha256"]}}
    if "checkpoint_sha256" in model:
        checkpoint["digest"] = {"sha256": model["checkpoint_sha256"]}
    if "license" in model:
        checkpoint["annotations"]["license"] = model["license"]
    parameters = manifest.get("recipe") or {
        "target": manifest["target"]["name"], "precision": manifest["precision"], **manifest["limits"]}
    tools = [{"uri": tool["purl"], "name": tool["name"]} for tool in _components(manifest)]
    return {
        "buildDefinition": {"buildType": f"{builder}#build", "externalParameters": parameters,
                            "resolvedDependencies": [checkpoint, *tools]},
        "runDetails": {"builder": {"id": builder}},
    }


def sbom(manifest: dict[str, Any]) -> dict[str, Any]:
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": _components(manifest)}


def _components(manifest: dict[str, Any]) -> list[dict[str, str]]:
    """The tools of the build; the manifest tells each as "version" or "package version (more)"."""
    tools = {"ingot-llm": manifest["ingot_version"], **manifest["toolchain"]}
    return [_component(name, str(value)) for name, value in sorted(tools.items())]


def _component(name: str, value: str) -> dict[str, str]:
    match = _VERSION.fullmatch(value)
    if match is not None:
        name, version = match["name"] or name, match["version"]
    else:
        version = value
    name = _PACKAGES.get(name, name)
    component = {"type": "application" if match and match["name"] else "library", "name": name, "version": version,
                 "purl": f"pkg:pypi/{name}@{version}"}
    if match is not None and match["rest"].strip():
        component["description"] = match["rest"].strip(" ()")
    return component
