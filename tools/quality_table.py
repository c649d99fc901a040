"""What each precision costs: perplexity, agreement, KL divergence and bytes of a model, in one table.

    python -m tools.quality_table smollm2 gemma3
    python -m tools.quality_table ./checkpoint --rows int8 'w4a8*' --tokens 6000 -o table.json

Names are those of tools/demo_models.py, or checkpoint folders. Engines for this machine's CPU are built and run; the
forms of GPUs are the last graph of their build in numpy, with every matrix and its inputs rounded as the kernels round
them (compiler/quality_graph.py). All are held against transformers in float32 on the held-out text. With
--llama-perplexity the table ends with llama.cpp's own figures for GGUF files, by its own protocol.

-o keeps what was measured, row by row; rows that stand there for the same text and tokens are not measured again. A row
that cannot be measured is told, and the others go on; the exit status is 1 then.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from ingot.compiler.auto.find import Finder
from ingot.compiler.auto.search import MARGIN
from ingot.compiler.build import BuildRequest, build
from ingot.compiler.cache.build_cache import BuildCache
from ingot.compiler.cache.calibration import Calibration, InputsOfModel, calibrated
from ingot.compiler.cache.tensor_digests import tensor_digests
from ingot.compiler.calibration.text import default_text
from ingot.compiler.clock import Clock
from ingot.compiler.model_source import open_checkpoint_source
from ingot.compiler.passes.pipeline import gpu_pipeline, run_passes
from ingot.compiler.precision import AUTO, Precision, find_precision, with_groups, with_layers
from ingot.compiler.quality import Scorer, engine_scorer, reference_scorer
from ingot.compiler.quality_gate import QualitySums, held_out_text, increase_text
from ingot.compiler.quality_graph import QuantizedGraph
from ingot.compiler.reference_model import ReferenceModel
from ingot.compiler.targets import find_target
from ingot.runtime.cli.output import Progress, size, table
from ingot.runtime.engine import Engine
from ingot.runtime.errors import IngotError, RequestError
from ingot.runtime.folders import cache_folder
from ingot.runtime.tokenizer import Tokenizer

WINDOW = 256


@dataclass(frozen=True)
class Row:
    """A precision on a target.

    method   how weights are rounded, see calibration.record.METHODS
    groups   of four-bit integers on GPUs: channels, and whether there are minimums; see precision.with_groups
    """

    label: str
    target: str
    precision: str
    method: str = "best"
    groups: tuple[int | None, bool | None] = (None, None)

    @property
    def is_graph(self) -> bool:
        return find_target(self.target).gpu is not None

    @property
    def budget(self) -> float | None:
        """Of precision auto."""
        return next(value for text, value in _BUDGETS.items() if f"at {text}," in self.label) \
            if self.precision == AUTO else None


ROWS = (
    Row("fp32, CPU", "cpu", "fp32"), Row("bf16, CPU", "cpu", "bf16"), Row("int8, CPU", "cpu", "int8"),
    Row("w4a8 to nearest, CPU", "cpu", "w4a8", "rtn"), Row("w4a8 best, CPU", "cpu", "w4a8"),
    Row("bf16, GPU", "h200", "bf16"),
    Row("fp8 to nearest, GPU", "h200", "fp8", "rtn"), Row("fp8 GPTQ, GPU", "h200", "fp8"),
    *(Row(f"int8 {name}, GPU", "h200", "int8", method) for method, name in (
        ("rtn", "to nearest"), ("awq", "SmoothQuant"), ("best", "best"))),
    *(Row(f"{precision} {name}, GPU", target, precision, method)
      for precision, target in (("int4", "h200"), ("w4a8", "h200"), ("nvfp4", "b200"))
      for method, name in (("rtn", "to nearest"), ("awq", "AWQ"), ("gptq", "GPTQ"), ("best", "best"))),
    *(Row(f"{precision} best, {target}, groups of {size}{' with minimums' if minimums else ''}", target, precision,
          "best", (size, minimums))
      for precision, target in (("int4", "h200"), ("w4a8", "h200"), ("w4a8", "a100"))
      for size in (128, 32) for minimums in (False, True)),
    Row("auto at 1 %, CPU", "cpu", AUTO), Row("auto at 1 %, GPU", "h200", AUTO),
    Row("auto at 0.5 %, GPU", "h200", AUTO),
)
_BUDGETS = {"1 %": 0.01, "0.5 %": 0.005}


@dataclass(frozen=True)
class Measured:
    """increase: of the perplexity over the checkpoint's in float32, with its standard error. num_bytes: of the stored
    weights."""

    label: str
    perplexity: float
    increase: float
    standard_error: float
    top1_agreement: float
    kl_divergence: float
    num_bytes: int

    def cells(self) -> tuple[str, ...]:
        return (self.label, f"{self.perplexity:.4f}", increase_text(self.increase, self.standard_error),
                f"{self.top1_agreement:.2%}", f"{self.kl_divergence:.2e}", size(self.num_bytes))


HEADS = ("", "perplexity", "increase", "best token equal", "KL (nats)", "weights")


class Model:
    """A checkpoint, the text in its tokens, and what transformers makes of it."""

    def __init__(self, place: str, num_tokens: int, text: str, cache: BuildCache, progress: Progress) -> None:
        self.source, self.cache, self.progress = open_checkpoint_source(place, None), cache, progress
        self.facts = self.source.facts(cache)
        self.checkpoint = self.source.checkpoint
        members = self.facts.tokenizer
        reader = Tokenizer(members["tokenizer.json"], json.loads(members["config.json"]))
        self.prefix = reader.encode("")
        self.tokens = reader.encode(text, add_special_tokens=False)[:num_tokens]
        self.text_sha256 = hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()
        self.folder = tempfile.TemporaryDirectory(prefix="ingot-quality-")
        self._inputs: InputsOfModel | None = None
        self._expected: list[Path] = []

    def windows(self) -> Iterator[list[int]]:
        step = WINDOW - len(self.prefix)
        for begin in range(0, len(self.tokens), step):
            yield [*self.prefix, *self.tokens[begin:begin + step]]

    def expected(self) -> list[Path]:
        """The reference's logits of each window, in files: they outweigh the model."""
        if not self._expected:
            score = reference_scorer(ReferenceModel(str(self.checkpoint.path)))
            for number, ids in enumerate(self.windows()):
                self.progress.show(f"transformers: window {number}")
                path = Path(self.folder.name, f"{number}.npy")
                np.save(path, np.concatenate(list(score(ids))))
                self._expected.append(path)
        return self._expected

    def measure(self, label: str, score: Scorer, num_bytes: int) -> Measured:
        sums = QualitySums()
        for number, (ids, path) in enumerate(zip(self.windows(), self.expected(), strict=True)):
            self.progress.show(f"{label}: window {number} of {len(self.expected())}")
            sums.add(score, _stored(path), ids, max(len(self.prefix), 1))
        perplexity, own = math.exp(sums.nll / sums.count), math.exp(sums.reference_nll / sums.count)
        return Measured(label, perplexity, perplexity / own - 1, sums.standard_error(), sums.agreeing / sums.count,
                        sums.kl / sums.count, num_bytes)

    def reference(self) -> Measured:
        own = self.measure("transformers, fp32", self._repeated, 0)
        count = sum(math.prod(self.checkpoint.shape(name)) for name in self.checkpoint.names())
        return Measured(own.label, own.perplexity, 0.0, 0.0, 1.0, 0.0, 4 * count)

    def _repeated(self, ids: Sequence[int]) -> Iterable[np.ndarray]:
        number = next(i for i, window in enumerate(self.windows()) if window == list(ids))
        return _stored(self.expected()[number])(ids)

    def row(self, row: Row) -> Measured:
        return self._graph(row) if row.is_graph else self._engine(row)

    def _engine(self, row: Row) -> Measured:
        output = Path(self.folder.name, "x.engine")
        result = build(BuildRequest(str(self.checkpoint.path), row.target, row.precision, output, force=True,
                                    max_batch_size=1, max_num_tokens=WINDOW, max_seq_len=WINDOW,
                                    quantization_method=row.method, max_perplexity_increase=row.budget),
                       lambda stage, detail: self.progress.show(f"{row.label}: {stage} {detail}"), self.cache)
        with Engine.load(output, kv_cache_tokens=WINDOW) as engine:
            return self.measure(row.label, engine_scorer(engine), result.manifest["memory"]["weights_bytes"])

    def _graph(self, row: Row) -> Measured:
        precision = self._precision(row)
        imported, _ = self.source.graph(self.facts, WINDOW, self.cache)
        quantized = QuantizedGraph(run_passes(imported, gpu_pipeline(precision, precision.kv)), True)
        calibration = Calibration()
        if row.method != "rtn":
            calibration = calibrated(self.checkpoint, quantized.weights, self.inputs(), row.method)
        score = quantized.scorer(self.checkpoint, calibration,
                                 lambda detail: self.progress.show(f"{row.label}: {detail}"))
        return self.measure(row.label, score, quantized.size_bytes)

    def _precision(self, row: Row) -> Precision:
        """Of a GPU."""
        target, groups = find_target(row.target), row.groups
        if row.precision != AUTO:
            precision = find_precision(row.precision, target.gpu)
        else:
            asked = BuildRequest(str(self.checkpoint.path), row.target, AUTO, max_batch_size=1, max_num_tokens=WINDOW,
                                 max_seq_len=WINDOW)
            clock = Clock(lambda stage, detail: self.progress.show(f"{row.label}: {stage} {detail}"))
            assert row.budget is not None
            found = Finder(asked, self.source, target, clock, self.cache).find(row.budget, MARGIN)
            precision = with_layers(find_precision(found.base, target.gpu), found.layers, target.gpu)
            groups = found.groups or groups
        return with_groups(precision, *groups)

    def inputs(self) -> InputsOfModel:
        if self._inputs is None:
            self._inputs = InputsOfModel(self.checkpoint, tensor_digests(self.checkpoint, self.cache),
                                         self.facts.tokenizer, default_text(), self.cache,
                                         lambda detail: self.progress.show(f"calibration: {detail}"))
        return self._inputs


def _stored(path: Path) -> Scorer:
    """The logits of one window, from a file."""
    return lambda ids: [np.load(path, mmap_mode="r")]


def llama_rows(binary: Path, files: Sequence[Path], text: Path, num_tokens: int) -> list[tuple[str, str, str]]:
    """(file, perplexity, increase over the first file) as llama.cpp measures them: windows of the same length, of which
    only the second half counts."""
    found: list[tuple[str, float]] = []
    for file in files:
        command = [str(binary), "-m", str(file), "-f", str(text), "-c", str(WINDOW), "-b", str(WINDOW), "--chunks",
                   str(num_tokens // WINDOW)]
        done = subprocess.run(command, capture_output=True, text=True)
        match = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
        if match is None:
            raise RequestError(f"{binary} gives no perplexity for {file} (exit status {done.returncode}): "
                               f"{done.stderr.strip()[-200:]}")
        found.append((file.name, float(match[1])))
    return [(name, f"{value:.4f}", f"{value / found[0][1] - 1:+.2%}") for name, value in found]


def _place(name: str) -> str:
    demo = cache_folder() / "models" / name
    return str(demo) if demo.is_dir() else name


def _known(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser("quality_table", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", help="smollm2, gemma3, or checkpoint folders")
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="labels, such as 'int4*'")
    parser.add_argument("--tokens", type=int, default=6000, help="of the text (default 6000)")
    parser.add_argument("--text", type=Path, help="in place of the held-out text that ships with the compiler")
    parser.add_argument("-o", "--output", type=Path, help="JSON with everything that was measured")
    parser.add_argument("--llama-perplexity", type=Path, metavar="BINARY", help="llama.cpp's tool of that name")
    parser.add_argument("--gguf", type=Path, nargs="+", default=[], help="files for it; the first is the reference")
    arguments = parser.parse_args()
    text = arguments.text.read_text() if arguments.text else held_out_text()
    rows = [row for row in ROWS if any(fnmatchcase(row.label, pattern) for pattern in arguments.rows)]
    if not rows:
        parser.error(f"no row matches; there are: {'; '.join(row.label for row in ROWS)}")
    failed = 0
    try:
        for name in arguments.models:
            failed += _model(name, rows, text, arguments)
        if arguments.llama_perplexity is not None:
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
                file.write(text)
                file.flush()
                found = llama_rows(arguments.llama_perplexity, arguments.gguf, Path(file.name), arguments.tokens)
            print(table(found, ("llama.cpp", "perplexity", "increase")))
    except IngotError as error:
        print(f"quality_table: {error}", file=sys.stderr)
        return error.exit_status
    return 1 if failed else 0


def _model(name: str, rows: Sequence[Row], text: str, arguments: argparse.Namespace) -> int:
    """How many rows could not be measured."""
    failed, progress = 0, Progress(True)
    model = Model(_place(name), arguments.tokens, text, BuildCache(), progress)
    known = _known(arguments.output)
    entry = known.setdefault(f"{name} {model.text_sha256[:16]}", {})
    for label, measure in (("transformers, fp32", model.reference),
                           *((row.label, lambda row=row: model.row(row)) for row in rows)):
        if label not in entry:
            try:
                entry[label] = asdict(measure())
            except IngotError as error:  # the other rows do not depend on it
                progress.clear()
                print(f"quality_table: {name}, {label}: {error}", file=sys.stderr, flush=True)
                failed += 1
                continue
            if arguments.output is not None:
                arguments.output.write_text(json.dumps(known, indent=1) + "\n")
            progress.clear()
            print(f"{name}: {'  '.join(Measured(**entry[label]).cells())}", file=sys.stderr, flush=True)
    progress.clear()
    print(f"{name}: {len(model.tokens)} tokens (SHA-256 {model.text_sha256[:16]}…) in windows of {WINDOW}")
    print(table([Measured(**cells).cells() for cells in entry.values()], HEADS))
    return failed


if __name__ == "__main__":
    sys.exit(main())
