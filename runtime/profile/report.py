"""Profiles and rooflines of an engine: as JSON, and as people read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ..cli.output import size, table
from ..devices import device_of
from ..devices.native_code import check_cpu
from ..engine_file import EngineFile
from ..errors import RequestError
from ..host import available_cores
from ..program import Limits, check_plan_version
from .ceilings import Ceilings, measure_ceilings
from .profile import Measured, profile, roofline, summed, usual_phases

KINDS: dict[str, Callable[[Measured], str]] = {
    "operator": lambda launch: launch.op, "part": lambda launch: launch.part, "kernel": lambda launch: launch.kernel}
"""What launches are summed up by."""

ROOFLINE_CONTEXT = 512
_SECONDS = 1.5
_LEAST_SHARE = 0.002


def profile_engine(engine: EngineFile, context: int, num_workers: int | None, progress: Callable[[str], None],
                   device: str | None = None) -> dict[str, Any]:
    """Measures the usual phases, in some seconds. device: as load_program takes it.

    Raises RequestError (EngineMismatch, NoGpu, EngineFormatError) or WorkFailed."""
    check_plan_version(engine)
    where = _where(engine, num_workers, device)
    if where["device"] == "emulator":
        raise RequestError("the emulator tells nothing about time: profile the engine on the GPU that it is for.\n"
                           f"  What is expected of it there: ingot inspect {engine.path} --kernels")
    phases = usual_phases(Limits.of(engine.manifest), context)
    found = profile(engine, phases, where["num_workers"], _SECONDS, progress, device)
    progress("ceilings of this machine")
    ceilings = _ceilings(engine, where)
    return {"engine": str(engine.path), **where, "ceilings": asdict(ceilings), "phases": [
        {**asdict(each.phase), "num_steps": each.num_steps, "step_s": each.step_s, "least_step_s": each.least_step_s,
         **{kind: [asdict(row) for row in summed(each.launches, key, ceilings)] for kind, key in KINDS.items()}}
        for each in found]}


def _where(engine: EngineFile, num_workers: int | None, device: str | None) -> dict[str, Any]:
    """"device" that the engine runs on, and "num_workers" of a CPU, else None."""
    name, numbers = device_of(engine, device)
    if name == "cuda":
        return {"device": "cuda:" + ",".join(map(str, numbers)), "num_workers": None}
    return {"device": name, "num_workers": available_cores() if num_workers is None else num_workers}


def _ceilings(engine: EngineFile, where: dict[str, Any]) -> Ceilings:
    if where["device"].startswith("cuda"):
        from .gpu_ceilings import measure_gpu_ceilings

        return measure_gpu_ceilings(int(where["device"].partition(":")[2].partition(",")[0]))
    check_cpu(engine)
    return measure_ceilings(engine, where["num_workers"])


def profiles_text(facts: dict[str, Any], kinds: Sequence[str]) -> str:
    """kinds: of KINDS, a table for each."""
    texts = [_ceilings_text(facts)]
    for phase in facts["phases"]:
        tokens = phase["num_seqs"] * phase["num_new"]
        texts.append(f"{phase['name']} (sequences of {phase['context']} tokens): a step in {phase['step_s'] * 1e3:.3f} "
                     f"ms, at least {phase['least_step_s'] * 1e3:.3f} (median and minimum of {phase['num_steps']}); "
                     f"{tokens / phase['step_s']:.0f} tok/s")
        texts += [_rows_text(kind, phase[kind]) for kind in kinds]
    return "\n\n".join(texts)


def _rows_text(kind: str, rows: list[dict[str, Any]]) -> str:
    total = sum(row["seconds"] for row in rows)
    shown = [row for row in rows if row["seconds"] >= _LEAST_SHARE * total]
    if rest := rows[len(shown):]:
        shown = [*shown, _sum("others", rest)]
    lines = [_cells(row, total) for row in [*shown, _sum("all", rows)]]
    return table(lines, (kind, "launches", "us", "share", "us each", "bytes", "GB/s", "GOP/s", "of roofline"))


def _cells(row: dict[str, Any], total: float) -> tuple[str, ...]:
    seconds = row["seconds"]

    def rate(count: int) -> str:
        return f"{count / seconds / 1e9:.1f}" if count and seconds else ""

    return (row["name"], str(row["launches"]), f"{seconds * 1e6:.1f}", f"{seconds / total:.1%}",
            f"{seconds * 1e6 / row['launches']:.2f}", size(row["num_bytes"]) if row["num_bytes"] else "",
            rate(row["num_bytes"]), rate(row["operations"]), f"{row['roofline_s'] / seconds:.0%}" if seconds else "")


def _sum(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts = ("launches", "seconds", "num_bytes", "operations", "roofline_s")
    return {"name": name, **{key: sum(row[key] for row in rows) for key in counts}}


def _ceilings_text(facts: dict[str, Any]) -> str:
    ceilings = facts["ceilings"]
    memory = f"{ceilings['read_bytes_s'] / 1e9:.1f} GB/s"
    if not ceilings["operations_s"]:
        return (f"At most, measured now on {facts['device']}: memory {memory}, read and written by a copy. How fast it "
                "multiplies is not known here: least times are those of memory alone.")
    rates = ", ".join(f"{kind} {rate / 1e9:.0f} GOP/s" for kind, rate in ceilings["operations_s"].items())
    return f"At most, measured now with {facts['num_workers']} workers: memory {memory}, {rates}"


def engine_roofline(engine: EngineFile) -> dict[str, Any]:
    """What steps of the usual phases must read and multiply; how long that takes at least, if the engine runs here."""
    ceilings, obstacle = None, None
    where = _where(engine, None, None)
    try:
        ceilings = _ceilings(engine, where)
    except RequestError as error:
        obstacle = str(error)
    phases = usual_phases(Limits.of(engine.manifest), ROOFLINE_CONTEXT)
    return {**where, "ceilings": None if ceilings is None else asdict(ceilings),
            "why_not_here": obstacle, "phases": [roofline(engine, phase, ceilings) for phase in phases]}


def roofline_text(facts: dict[str, Any]) -> str:
    rows = []
    for phase in facts["phases"]:
        operations = ", ".join(f"{kind} {count / 1e9:.3f}" for kind, count in phase["operations"].items())
        cells = [phase["phase"], phase["new_tokens"], phase["context"], size(phase["bytes"]), operations]
        if "least_s" in phase:
            cells += [f"{phase['reading_s'] * 1e3:.3f}", f"{phase['least_s'] * 1e3:.3f}",
                      f"{phase['most_tokens_s']:.0f}"]
        rows.append(cells)
    header = ("a step of", "tokens", "context", "bytes", "GOP", "ms to read", "ms at least", "tok/s at most")
    known = _ceilings_text(facts) if facts["ceilings"] else f"No times: {facts['why_not_here']}"
    return known + "\n\n" + table(rows, header[:len(rows[0])])
