"""What each peer needs of the model: converted once, into a folder that appears when it is complete."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.runtime.errors import WorkFailed

from .environments import Say, environment, run

LLAMA_CPP = "llama-cpp-python==0.3.36"
TORCH = "torch==2.13.0"
ENVIRONMENTS = {
    "openvino": (TORCH, "openvino-genai==2026.4.1.0 optimum-intel==2.2.0 openvino-tokenizers==2026.4.1.0 nncf==3.4.0 "
                 "transformers==5.0.0"),
    "onnxruntime": (TORCH, "onnxruntime-genai==0.18.0 transformers==5.5.* onnx==1.23.2 onnx-ir"),
    "ctranslate2": (TORCH, "ctranslate2==4.8.5 transformers<5 sentencepiece"),
}


@dataclass(frozen=True)
class Model:
    """checkpoint: Hugging Face folder. gguf: what llama.cpp loads. is_random: its weights mean nothing, so that nothing
    is gained by rounding them well."""

    name: str
    checkpoint: Path
    gguf: Path
    is_random: bool = False


class Kitchen:
    """Where the peers' things lie. Every method returns what a driver loads."""

    def __init__(self, cache: Path, model: Model, threads: int, say: Say) -> None:
        self.cache, self.model, self.threads, self.say = cache, model, threads, say

    def python(self, peer: str) -> Path:
        return environment(self.cache, peer, ENVIRONMENTS[peer], self.say)

    def made(self, name: str, make: Callable[[Path], None]) -> Path:
        """The folder `name` of this model, filled by `make` if it is not there."""
        folder = self.cache / "models" / f"{self.model.name}-{name}"
        if not folder.exists():
            self.say(f"{self.model.name}: preparing {name}")
            partial = folder.with_name(f".{folder.name}.{os.getpid()}")
            shutil.rmtree(partial, ignore_errors=True)
            partial.parent.mkdir(parents=True, exist_ok=True)
            try:
                make(partial)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return folder

    def log(self, name: str) -> Path:
        return self.cache / f"{self.model.name}-{name}.log"

    def ingot(self, precision: str) -> Path:
        def make(folder: Path) -> None:
            folder.mkdir()
            run([sys.executable, "-m", "ingot.runtime.cli", "build", str(self.model.checkpoint), "--target", "cpu",
                 "--precision", precision, "-o", str(folder / "x.engine"),
                 *(["--no-calibration"] if self.model.is_random else [])], self.log(f"ingot-{precision}"))

        folder = self.cache / "models" / f"{self.model.name}-ingot-{precision}"
        shutil.rmtree(folder, ignore_errors=True)  # always of the code at hand
        return self.made(f"ingot-{precision}", make) / "x.engine"

    def v4_checkpoint(self) -> Path:
        """The same checkpoint with the configuration that libraries of transformers 4 read."""
        def make(folder: Path) -> None:
            shutil.copytree(self.model.checkpoint, folder, symlinks=False)
            config = json.loads((folder / "config.json").read_text())
            config |= {**_v4_rope(config.pop("rope_parameters", None) or {}),
                       "torch_dtype": config.pop("dtype", "bfloat16")}
            (folder / "config.json").write_text(json.dumps(config))
            tokenizer = folder / "tokenizer_config.json"
            if tokenizer.exists():
                values = json.loads(tokenizer.read_text())
                tokenizer.write_text(json.dumps(values | {"tokenizer_class": "PreTrainedTokenizerFast"}))

        return self.made("v4", make)

    def openvino(self, weights: str) -> Path:
        """int4: groups of 64, the largest that divides the rows of small models."""
        def make(folder: Path) -> None:
            form = ["--group-size", "64", "--ratio", "1.0"] if weights == "int4" else []
            run([str(self.python("openvino").with_name("optimum-cli")), "export", "openvino", "--model",
                 str(self.model.checkpoint), "--task", "text-generation-with-past", "--weight-format", weights, *form,
                 str(folder)], self.log("openvino"))

        return self.made(f"openvino-{weights}", make)

    def onnxruntime(self) -> Path:
        def make(folder: Path) -> None:
            run([str(self.python("onnxruntime")), "-m", "onnxruntime_genai.models.builder", "-m",
                 str(self.v4_checkpoint()), "-o", str(folder), "-p", "int4", "-e", "cpu", "--extra_options",
                 "int4_accuracy_level=4"], self.log("onnxruntime"))
            path = folder / "genai_config.json"
            config = json.loads(path.read_text())
            config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = self.threads
            path.write_text(json.dumps(config))

        return self.made(f"onnxruntime-int4-{self.threads}", make)

    def ctranslate2(self) -> Path:
        def make(folder: Path) -> None:
            run([str(self.python("ctranslate2").with_name("ct2-transformers-converter")), "--model",
                 str(self.v4_checkpoint()), "--output_dir", str(folder), "--quantization", "int8"],
                self.log("ctranslate2"))

        return self.made("ctranslate2-int8", make)

    def llama_cpp(self) -> Path:
        """The folder of llama.cpp's tools, built here from the sources inside a PyPI package; some ten minutes."""
        target = self.cache / LLAMA_CPP.replace("==", "-")
        tools = target / "build/bin"
        if not (target / "built.stamp").exists():
            self.say(f"llama.cpp: building the copy in {LLAMA_CPP}, some ten minutes")
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            log = target.with_suffix(".log")
            run([sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", str(target),
                 LLAMA_CPP], log)
            with tarfile.open(next(target.glob("*.tar.gz"))) as archive:
                archive.extractall(target, filter="data")
            source = next(target.glob("llama_cpp_python-*/vendor/llama.cpp"), None)
            if source is None:
                raise WorkFailed(f"{LLAMA_CPP} no longer holds llama.cpp's sources in vendor/llama.cpp")
            run(["cmake", "-S", str(source), "-B", str(target / "build"), "-DCMAKE_BUILD_TYPE=Release",
                 "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
                 "-DLLAMA_BUILD_SERVER=OFF"], log)
            run(["cmake", "--build", str(target / "build"), "-j", str(self.threads), "--target", "llama-bench",
                 "llama-batched-bench", "llama-quantize"], log)
            (target / "built.stamp").touch()
        return tools

    def gguf(self, kind: str) -> Path:
        """The model as llama.cpp quantizes it; the file itself if it is of that kind."""
        if kind in self.model.gguf.name:
            return self.model.gguf

        def make(folder: Path) -> None:
            folder.mkdir()
            run([str(self.llama_cpp() / "llama-quantize"), "--allow-requantize", str(self.model.gguf),
                 str(folder / "x.gguf"), kind, str(self.threads)], self.log(f"gguf-{kind}"))

        return self.made(f"gguf-{kind}", make) / "x.gguf"


def _v4_rope(parameters: dict[str, Any]) -> dict[str, float]:
    """rope_parameters in the words of transformers 4; Gemma 3 has others for layers with a window."""
    if "full_attention" in parameters:
        return {"rope_theta": parameters["full_attention"]["rope_theta"],
                "rope_local_base_freq": parameters["sliding_attention"]["rope_theta"]}
    return {"rope_theta": parameters.get("rope_theta", 10000.0)}
