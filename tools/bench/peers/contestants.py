"""Who is measured: how each one is prepared, and run for one round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ingot.runtime.errors import WorkFailed

from .job import Job, Result
from .prepare import Kitchen

DRIVERS = Path(__file__).parent / "drivers"


@dataclass(frozen=True)
class Contestant:
    """name: as in the table. peer: "ingot" or whose it is. prepare gives what a round needs, run one round's result."""

    name: str
    peer: str
    prepare: Callable[[Kitchen], Path]
    run: Callable[[Kitchen, Path, Job], Result]


def _driver(script: str, peer: str | None) -> Callable[[Kitchen, Path, Job], Result]:
    def run(kitchen: Kitchen, model: Path, job: Job) -> Result:
        python = kitchen.python(peer) if peer else Path(sys.executable)
        threads = str(job.threads)
        settings = {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(DRIVERS.parent), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([str(python), str(DRIVERS / script)], capture_output=True, text=True,
                              input=json.dumps(asdict(replace(job, model=str(model)))), env=os.environ | settings)
        for line in done.stdout.splitlines():
            if line.startswith("RESULT "):
                return Result(**json.loads(line.removeprefix("RESULT ")))
        raise WorkFailed(f"{script} gave no result (exit {done.returncode}):\n  " + "\n  ".join(
            (done.stdout + done.stderr).splitlines()[-6:]))

    return run


def _llama_cpp(kitchen: Kitchen, model: Path, job: Job) -> Result:
    """By llama-bench and llama-batched-bench: random tokens, no sampling."""
    tools, threads = kitchen.llama_cpp(), str(job.threads)
    prompt, new = len(job.generation_prompt), job.new_tokens
    common = ["-m", str(model), "-t", threads]
    bench = [str(tools / "llama-bench"), *common, "-r", "3", "-o", "json"]
    generation = json.loads(_output([*bench, "-p", "0", "-n", str(new), "-d", str(prompt)]))
    context = json.loads(_output([*bench, "-p", str(len(job.context_prompts[0])), "-n", "0"]))
    count = len(job.request_prompts)
    batch = _output([str(tools / "llama-batched-bench"), *common, "-tb", threads, "-b", "2048", "-ub", "512",
                     "-c", str(count * (prompt + new) + 128), "-npp", str(prompt), "-ntg", str(new),
                     "-npl", str(count), "--output-format", "jsonl"])
    row = json.loads([line for line in batch.splitlines() if line.startswith("{")][-1])
    return Result(generation=generation[-1]["avg_ts"], context=context[-1]["avg_ts"],
                  requests=count * new / float(row["t"]))


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise WorkFailed(f"{Path(command[0]).name} ended with {done.returncode}:\n  "
                         + "\n  ".join(done.stderr.splitlines()[-5:]))
    return done.stdout


def contestants() -> list[Contestant]:
    def ingot(precision: str) -> Contestant:
        return Contestant(f"Ingot {precision}", "ingot", lambda kitchen: kitchen.ingot(precision),
                          _driver("ingot_engine.py", None))

    def llama_cpp(kind: str) -> Contestant:
        return Contestant(f"llama.cpp {kind}", "llama.cpp", lambda kitchen: kitchen.gguf(kind), _llama_cpp)

    def openvino(weights: str) -> Contestant:
        return Contestant(f"OpenVINO GenAI {weights}", "openvino", lambda kitchen: kitchen.openvino(weights),
                          _driver("openvino_genai_driver.py", "openvino"))

    return [
        ingot("w4a8"), ingot("int8"),
        llama_cpp("Q4_0"), llama_cpp("Q4_1"), llama_cpp("Q8_0"),
        openvino("int4"), openvino("int8"),
        Contestant("ONNX Runtime GenAI int4", "onnxruntime", Kitchen.onnxruntime,
                   _driver("onnxruntime_genai_driver.py", "onnxruntime")),
        Contestant("CTranslate2 int8", "ctranslate2", Kitchen.ctranslate2,
                   _driver("ctranslate2_driver.py", "ctranslate2")),
        Contestant("transformers fp32 eager", "transformers", lambda kitchen: kitchen.model.checkpoint,
                   _driver("transformers_eager.py", None)),
    ]
