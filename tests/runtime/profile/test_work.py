"""What launches have to read and multiply, counted by hand for small ones."""

from typing import Any

import pytest

from ingot.runtime.profile.work import Phase, Work, work_of

PLAN: dict[str, Any] = {
    "weights": {"w": {"shape": [96, 64], "size": 4000, "scheme": "w4a8"},
                "b": {"shape": [96], "size": 384, "scheme": ""},
                "e": {"shape": [8, 96, 64], "size": 8000, "scheme": "int8"}},
    "kernels": {"sums": {"constants": {"CHOICES": 3, "SUM_ROWS": 8}}},
    "kv": {"windows": [None, 100], "slots": [
        {"slot": 0, "table": 0, "heads": 2, "key_dim": 16, "value_dim": 8, "dtype": "bf16"},
        {"slot": 3, "table": 1, "heads": 2, "key_dim": 16, "value_dim": 8, "dtype": "f32"},
        {"slot": 4, "table": 0, "heads": 2, "key_dim": 16, "value_dim": 8, "dtype": "i8", "key_scale_offset": 512,
         "value_scale_offset": 1024}]},
}
GENERATION = Phase("generation", 4, 1, 500)
PROMPT = Phase("prompt", 1, 300, 300)


def launch(op: str, *args: list[Any], shape: list[int | str] | None = None) -> dict[str, Any]:
    writes = {"y": {"arg": 9, "shape": shape, "dtype": "f32"}} if shape else {}
    return {"op": op, "args": [["arena", 0], *args], "writes": writes}


@pytest.mark.parametrize(("entry", "phase", "work"), [
    (launch("linear", ["weight", "w"], ["weight", "b"], shape=[1, "T", 96]), GENERATION, (4384, 4 * 96 * 64, "w4a8")),
    ({**launch("rms_norm+linear", ["weight", "b"], ["weight", "w"], shape=["T", 96]),
      "writes": {"b": {"arg": 9, "shape": ["T", 96]}, "a": {"arg": 3, "shape": ["T", 64]},
                 "c": {"arg": 4, "shape": ["T", 64]}}}, GENERATION, (4384, 4 * 96 * 64, "w4a8")),
    (launch("linear", ["weight", "w"], shape=["L", 96]), PROMPT, (4000, 96 * 64, "w4a8")),
    (launch("embedding", ["weight", "w"], shape=["T", 64]), GENERATION, (4000 * 4 // 96, 0, "float")),
    (launch("embedding", ["weight", "w"], shape=["T", 64]), PROMPT, (4000, 0, "float")),
    (launch("expert_linear", ["weight", "e"], shape=["T", 1, 96]), GENERATION, (4000, 4 * 96 * 64, "int8")),
    (launch("expert_linear", ["weight", "e"], shape=["T", 3, 96]), GENERATION, (8000, 12 * 96 * 64, "int8")),
    (launch("expert_linear", ["weight", "e"], shape=["T", 1, 48]), GENERATION, (4000, 4 * 96 * 64, "int8")),
    ({**launch("expert_linear", ["weight", "e"], shape=["T", 96]), "kernel": "sums"}, GENERATION,
     (8000, 12 * 96 * 64, "int8")),
    (launch("route", ["weight", "w"], ["weight", "b"], shape=["T", 2]), GENERATION, (4384, 4 * 96 * 64, "w4a8")),
    (launch("route", ["weight", "b"], shape=["T", 2]), GENERATION, (384, 0, "float")),
    (launch("rms_norm", ["weight", "b"], shape=["T", 96]), PROMPT, (384, 0, "float")),
    (launch("loop", shape=["T", 96]), PROMPT, (0, 0, "float")),
    (launch("kv_write", ["kv", 0, "k"], ["kv", 0, "v"]), GENERATION, (4 * 2 * 24 * 2, 0, "float")),
    (launch("attention", ["kv", 0, "k"], ["kv", 0, "v"], shape=["T", 6, 8]), GENERATION,
     (4 * 500 * 96, 4 * 500 * 6 * 24, "float")),
    (launch("attention", ["kv", 0, "k"], ["kv", 0, "v"], shape=["T", 6, 8]), PROMPT,
     (300 * 96, 300 * 301 // 2 * 6 * 24, "float")),
    (launch("kv_write", ["kv", 4, "k"], ["kv", 4, "k_scale"]), GENERATION, (4 * 2 * (24 + 8), 0, "float")),
    (launch("attention", ["kv", 3, "k"], ["kv", 3, "v"], shape=["T", 6, 8]), GENERATION,
     (4 * 100 * 192, 4 * 100 * 6 * 24, "float")),
    (launch("attention", ["kv", 3, "k"], ["kv", 3, "v"], shape=["T", 6, 8]), PROMPT,
     (300 * 192, (100 * 101 // 2 + 200 * 100) * 6 * 24, "float")),
])
def test_work(entry: dict[str, Any], phase: Phase, work: tuple[int, int, str]) -> None:
    assert work_of(PLAN, entry, phase) == Work(*work)


@pytest.mark.parametrize(("slot", "phase", "features", "numbers"), [
    (0, PROMPT, ["avx512_bf16"], "bf16"), (0, GENERATION, ["avx512_bf16"], "bf16"), (0, PROMPT, ["avx2"], "float"),
    (3, PROMPT, ["avx512_bf16"], "float"), (4, GENERATION, ["avx2"], "int8"), (4, PROMPT, ["avx2"], "float"),
    (4, GENERATION, [], "float"),
])
def test_what_attention_multiplies(slot: int, phase: Phase, features: list[str], numbers: str) -> None:
    """Held against the ceiling of float32, what multiplies pairs of bfloat16 would be twice as fast as it can be."""
    entry = launch("attention", ["kv", slot, "k"], ["kv", slot, "v"], shape=["T", 6, 8])
    assert work_of(PLAN, entry, phase, features).arithmetic == numbers


@pytest.mark.parametrize(("scheme", "features", "numbers"), [
    ("bf16", ["avx512_bf16"], "bf16"), ("bf16", ["avx2"], "float"), ("bf16", [], "float"),
    ("w4a8", ["avx512_bf16"], "w4a8"),
])
def test_what_a_matrix_multiplies(scheme: str, features: list[str], numbers: str) -> None:
    plan = {**PLAN, "weights": {"w": {**PLAN["weights"]["w"], "scheme": scheme}}}
    entry = launch("linear", ["weight", "w"], shape=["T", 96])
    assert work_of(plan, entry, PROMPT, features).arithmetic == numbers
