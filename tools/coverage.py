"""Which of transformers' causal-LM classes Ingot can build: each is tried on a small random model.

    python -m tools.coverage OUT.jsonl [TYPE ...]      one row a class: built for this CPU in fp32 and run
    python -m tools.coverage --interpret OUT.jsonl …   the imported graph by its numpy references, nothing compiled
    python -m tools.coverage --report OUT.jsonl docs/models.md

Every class runs in a process of its own that is forked from this one, with a time limit.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ingot.runtime.errors import IngotError

Run = Callable[[Path, np.ndarray], np.ndarray]
"""(checkpoint folder, token ids i32[T]) -> logits f32[T, V]."""

TOLERANCE = 1e-4
TIMEOUT_S = 240


@dataclass
class Row:
    """status: "agrees", "differs" (error above the tolerance), "refused" (a clear error), "failed" (anything else),
    "no model" (transformers itself cannot build or run the small model)."""

    type: str
    status: str = "failed"
    model_class: str = ""
    layers: int = 0
    attentions: int = 0
    operators: list[str] = field(default_factory=list)
    error: float | None = None
    reason: str = ""
    seconds: float = 0.0


def interpret(folder: Path, ids: np.ndarray) -> np.ndarray:
    """The imported graph, run by its numpy references."""
    from ingot.compiler.checkpoint.open import open_checkpoint
    from ingot.compiler.importer.importer import import_model
    from ingot.compiler.ir.interpret import run
    checkpoint = open_checkpoint(folder)
    graph = import_model(checkpoint).graph
    inputs = {"token_ids": ids, "positions": np.arange(len(ids), dtype=np.int32)}
    return run(graph, inputs, checkpoint)[graph.outputs[0]]


def check(model_type: str, run: Run = interpret) -> Row:
    """Builds the small model, runs it in transformers and through `run`, compares the logits of every token."""
    import torch

    from tools.small_models import NUM_TOKENS, save_random, small_config
    row, start = Row(model_type), time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            config = small_config(model_type)
            model = save_random(config, folder)
            row.model_class, row.layers = type(model).__name__, config.get_text_config().num_hidden_layers
            ids = torch.randint(8, config.get_text_config().vocab_size, (1, NUM_TOKENS),
                                generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                expected = model(input_ids=ids, use_cache=False).logits[0].float().numpy()
        except Exception as error:
            row.status, row.reason = "no model", _reason(error)
        else:
            _compare(row, lambda: run(folder, ids[0].numpy().astype(np.int32)), expected)
            if row.status in ("agrees", "differs"):
                row.attentions, row.operators = _operators(folder)
    row.seconds = round(time.perf_counter() - start, 1)
    return row


def _compare(row: Row, logits: Callable[[], np.ndarray], expected: np.ndarray) -> None:
    try:
        got = logits()
    except IngotError as error:
        row.status, row.reason = "refused", str(error)
    except Exception as error:
        row.status, row.reason = "failed", _reason(error)
    else:
        row.error = float(np.abs(got - expected).max() / np.abs(expected).max())
        row.status = "agrees" if row.error <= TOLERANCE else "differs"


def _operators(folder: Path) -> tuple[int, list[str]]:
    from ingot.compiler.checkpoint.open import open_checkpoint
    from ingot.compiler.importer.importer import import_model
    graph = import_model(open_checkpoint(folder)).graph
    return sum(node.op == "attention" for node in graph.nodes), sorted({node.op for node in graph.nodes})


def _reason(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error).strip()[:300]} ({Path(frame.filename).name}:{frame.lineno})"


def check_apart(model_type: str, run: Run, timeout_s: float = TIMEOUT_S) -> Row:
    """check() in a forked process: a crash or an endless trace costs one row."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sender.send(asdict(check(model_type, run)))

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            return Row(model_type, reason=f"no answer within {timeout_s:.0f} s", seconds=timeout_s)
        return Row(**receiver.recv())
    except EOFError:
        process.join()
        return Row(model_type, reason=f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def sweep(out: Path, types: list[str], run: Run = interpret) -> None:
    import torch
    import transformers
    torch.set_num_threads(1)
    assert transformers.AutoModelForCausalLM  # loaded once, before the processes are forked
    with out.open("a") as file:
        for model_type in types:
            row = check_apart(model_type, run)
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            shown = f"{row.error:.1e}" if row.error is not None else row.reason.split("\n")[0][:100]
            print(f"{row.type:28s} {row.status:8s} {row.seconds:5.1f} s  {shown}", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="write the page from the rows instead of sweeping")
    parser.add_argument("--interpret", action="store_true", help="run the imported graph in numpy, compile nothing")
    parser.add_argument("rows", type=Path)
    parser.add_argument("rest", nargs="*", help="model types; with --report the page to write")
    options = parser.parse_args(arguments)
    if options.report:
        from tools.coverage_report import report
        Path(options.rest[0]).write_text(report(read_rows(options.rows)))
        return 0
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from tools.compiled_run import compiled_logits
    sweep(options.rows, options.rest or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
          interpret if options.interpret else compiled_logits)
    return 0


def read_rows(path: Path) -> list[Row]:
    """The last row of each class, in the order of the classes' names."""
    rows: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        row = Row(**json.loads(line))
        rows[row.type] = row
    return [rows[name] for name in sorted(rows)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
