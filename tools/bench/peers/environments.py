"""The peers' own environments: pinned packages in a folder of the cache, made once."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ingot.runtime.errors import WorkFailed

Say = Callable[[str], None]


def environment(cache: Path, name: str, requirements: Sequence[str], say: Say) -> Path:
    """The Python of an environment that has `requirements`, installed one group after the other."""
    digest = hashlib.sha256(repr((sys.version_info[:2], requirements)).encode()).hexdigest()[:8]
    folder = cache / f"{name}-{digest}"
    stamp = folder / "installed.stamp"
    python = folder / "bin/python"
    if stamp.exists():
        return python
    say(f"{name}: installing {' '.join(requirements)}")
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(folder)], folder.with_suffix(".log"))
    for group in requirements:
        run([str(python), "-m", "pip", "install", "--disable-pip-version-check", *group.split()],
            folder.with_suffix(".log"))
    stamp.touch()
    return python


def run(command: Sequence[str], log: Path, **options: object) -> None:
    """Raises WorkFailed with the last lines of the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        try:
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, **options).returncode  # type: ignore[call-overload]
        except FileNotFoundError:
            raise WorkFailed(f"{command[0]} is not installed here") from None
    if code:
        tail = "\n  ".join(log.read_text(errors="replace").splitlines()[-5:])
        raise WorkFailed(f"{' '.join(command[:4])} … ended with {code}; the whole output: {log}\n  {tail}")
