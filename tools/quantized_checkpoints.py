"""Small quantized checkpoints, each written by its format's own library, with the logits that the library's own
dequantized weights give: what the readers are held against.

    python -m tools.quantized_checkpoints write FOLDER [FORMAT…]      where the libraries are installed
    python -m tools.quantized_checkpoints check FOLDER                where Ingot is

`write` needs nvidia-modelopt, compressed-tensors, gptqmodel or autoawq, each for its own formats; a format whose
library is missing is told and left out. The model has two layers of random weights. `check` builds an fp32 engine of
every checkpoint below FOLDER and compares its logits.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tools.quantized_writers import FORMATS, IDS

LOGITS = "logits.json"
BOUND = 1e-3


def write(folder: Path, formats: list[str]) -> int:
    failed = 0
    for name in formats or FORMATS:
        try:
            logits = FORMATS[name](folder / name)
        except Exception as error:
            print(f"{name}: not written: {type(error).__name__}: {str(error)[:200]}")
            failed += 1
            continue
        if logits:
            (folder / name / LOGITS).write_text(json.dumps(logits))
        print(f"{name}: written")
    return int(failed > 0)


def check(folder: Path) -> int:
    import tempfile

    import numpy as np

    from ingot.compiler.build import BuildRequest, build
    from ingot.compiler.reference_model import ReferenceModel
    from ingot.runtime.engine import Engine
    failed = 0
    for path in sorted(p.parent for p in folder.glob("*/config.json")):
        with tempfile.TemporaryDirectory() as scratch:
            output = Path(scratch, "x.engine")
            result = build(BuildRequest(str(path), "cpu", "fp32", output, max_batch_size=1, max_num_tokens=32))
            with Engine.load(output, kv_cache_tokens=64) as engine:
                got = engine.logits(IDS)
        known = (path / LOGITS).exists()
        expected = np.array(json.loads((path / LOGITS).read_text()) if known else ReferenceModel(str(path)).logits(IDS))
        error = float(np.abs(got - expected).max())
        failed += not error <= BOUND
        formats = ", ".join(f"{row['count']} x {row['format']}"
                            for row in result.manifest["model"]["quantization"]["weights"])
        print(f"{path.name}: {formats}: largest difference {error:.2e} from "
              f"{'the library' if known else 'our own dequantized model alone'}")
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser("quantized_checkpoints", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"of {', '.join(FORMATS)}; default: all")
    arguments = parser.parse_args()
    if unknown := set(arguments.formats) - set(FORMATS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(FORMATS)}")
    return write(arguments.folder, arguments.formats) if arguments.action == "write" else check(arguments.folder)


if __name__ == "__main__":
    sys.exit(main())
