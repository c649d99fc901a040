"""What all tests share: the demo checkpoints, what has been compiled, and the markers `gpu` and `slow`."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import hypothesis
import pytest

from tools.demo_models import MODELS, Result, Unreachable, provide

# In one process Triton either interprets or compiles. Tests compile in processes of their own; engines for GPUs run in
# the emulator here, also after transformers has imported Triton for some reason of its own.
os.environ["TRITON_INTERPRET"] = "1"

# Where pytest runs several processes they share the cores: threads of numpy and torch in each would wait for others.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

# How long an example takes is no property of the code on a machine that others use too.
hypothesis.settings.register_profile("ingot", deadline=None)
hypothesis.settings.load_profile("ingot")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {} if config.getoption("--slow") else {"slow": "slow; runs with --slow"}
    if no_gpu := why_no_gpu():
        reasons["gpu"] = no_gpu
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_sessionstart() -> None:
    gc.disable()  # next to nothing of what is imported and collected now becomes garbage


def pytest_collection_finish() -> None:
    """All that there is now stays to the end: no collection of garbage, of which swaps of engines ask for one each, has
    to look through it again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # for the modules that tell at the end what was not freed


def why_no_gpu() -> str | None:
    """None if the CUDA driver offers a device, else the reason to skip."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1) on this machine"
    count = ctypes.c_int()
    if status := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"the CUDA driver does not start: CUresult {status}"
    return None if count.value else "the CUDA driver offers no device"


@pytest.fixture(scope="session")
def smollm2_demo() -> Result:
    return _demo("smollm2")


@pytest.fixture(scope="session")
def gemma3_demo() -> Result:
    return _demo("gemma3")


@pytest.fixture(scope="session")
def smollm2_checkpoint(smollm2_demo: Result) -> Path:
    """Folder of SmolLM2-135M-Instruct: bfloat16, tied embeddings, chat template."""
    return smollm2_demo.checkpoint


@pytest.fixture(scope="session")
def gemma3_checkpoint(gemma3_demo: Result) -> Path:
    """Folder of Gemma 3 270M: bfloat16, sliding and full attention, large vocabulary, base model."""
    return gemma3_demo.checkpoint


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2_demo: Result) -> Path:
    """The GGUF file (Q4_1, Q8_0) that the SmolLM2 checkpoint was made from."""
    return smollm2_demo.gguf


@pytest.fixture(scope="session")
def gemma3_gguf(gemma3_demo: Result) -> Path:
    """The GGUF file (Q4_K, Q5_0, Q6_K, Q8_0) that the Gemma 3 checkpoint was made from."""
    return gemma3_demo.gguf


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of pytest, the same in all of its processes."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def own_build_cache(run_folder: Path) -> Iterator[None]:
    """Builds of the command line neither see nor fill the user's build cache, unless a test names one."""
    from ingot.compiler.cache import build_cache

    folder = run_folder / "build_cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_cache, "cache_folder", lambda: Path(os.environ.get("INGOT_CACHE") or folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_once(run_folder: Path) -> Iterator[Callable[..., list[str]]]:
    """A C file that was compiled before in this run, by any of its processes, is taken from there: builds of tiny
    models have many files in common. Gives what compiles in any case."""
    from ingot.compiler.cache.build_cache import BuildCache
    from ingot.compiler.cpu import toolchain
    from ingot.compiler.cpu.isa import CpuIsa

    compile_anew, kept = toolchain._compile, BuildCache(run_folder / "objects")

    def compiled(sources: Mapping[str, str], isa: CpuIsa, include_dirs: Sequence[Path], folder: Path,
                 compiler: toolchain.Compiler, jobs: int, mode: tuple[str, ...], suffix: str) -> list[str]:
        keys = {name: f"{toolchain._object_key(text, isa, include_dirs, compiler)}{suffix}"
                for name, text in sources.items()}
        found = {name: data for name in sources if (data := kept.get("object", keys[name])) is not None}
        for name, data in found.items():
            (folder / f"{name}{suffix}").write_bytes(data)
        missing = {name: text for name, text in sources.items() if name not in found}
        compile_anew(missing, isa, include_dirs, folder, compiler, jobs, mode, suffix)
        for name in missing:
            kept.put("object", keys[name], (folder / f"{name}{suffix}").read_bytes())
        return [f"{name}{suffix}" for name in sources]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "_compile", compiled)
        yield compile_anew


@pytest.fixture
def compiles_anew(compiled_once: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """C files are compiled, whatever was compiled before."""
    monkeypatch.setattr("ingot.compiler.cpu.toolchain._compile", compiled_once)


@pytest.fixture(scope="session", autouse=True)
def kept_compilers() -> Iterator[None]:
    """A process that compiles kernels waits for the next test with the same environment: starting one takes as long as
    compiling a small kernel."""
    from ingot.compiler.gpu import triton_compile

    start = triton_compile._Worker
    waiting: dict[frozenset[tuple[str, str]], list[Kept]] = {}

    class Kept(start):  # type: ignore[misc, valid-type]
        def __init__(self, place: list[Kept]) -> None:
            super().__init__()
            self._place = place

        def close(self) -> None:
            if self._process.poll() is None:
                self._place.append(self)
            else:
                super().close()

    def worker() -> Kept:
        environment = frozenset(item for item in os.environ.items() if item[0] != "PYTEST_CURRENT_TEST")
        place = waiting.setdefault(environment, [])
        return place.pop() if place else Kept(place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_compile, "_Worker", worker)
        yield
    for each in chain.from_iterable(waiting.values()):
        start.close(each)


def _demo(name: str) -> Result:
    """Made on first use, in the user's cache. Without network that is no fault of the code: skip."""
    try:
        return provide(MODELS[name])
    except Unreachable as error:
        pytest.skip(f"{name} is not in the cache and cannot be fetched: {error}")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random llama: 2 layers, hidden size 64, 4 heads of 16 that share 2 of keys, vocabulary 256, float32,
    no tokenizer. Its weights are large enough that every part of it matters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * 0.15 if parameter.ndim > 1 else 1 + noise * 0.1)
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def speaking_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with a tokenizer: a token for each byte."""
    from tests.runtime.mock_engine import tokenizer_json

    folder = tmp_path_factory.mktemp("speaking") / "tiny-llama"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.fixture(scope="session")
def speaking_engine(speaking_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(target, precision) -> an engine of the tiny checkpoint with a tokenizer, built when first asked for."""
    from ingot.compiler.build import BuildRequest, build

    folder = tmp_path_factory.mktemp("speaking_engines")

    def engine(target: str = "cpu", precision: str = "fp32") -> Path:
        path = folder / f"{target.replace(':', '-')}.{precision}.engine"
        if not path.exists():
            build(BuildRequest(str(speaking_checkpoint), target, precision, path, max_batch_size=2, max_num_tokens=8,
                               calibrate=False))
        return path
    return engine
