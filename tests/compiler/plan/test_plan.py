"""The plan as an engine holds it."""
from __future__ import annotations

import json

from ingot.compiler.plan.kv_cache import KvCache, KvSlot
from ingot.compiler.plan.plan import NULL, Arg, Bucket, Launch, Output, Plan, Weight, Write


def test_arguments_are_bound_to_places() -> None:
    offsets = {"v1": 640}
    assert Arg("value", "v1", 8).to_json(offsets) == ["arena", 648]
    assert Arg("weight", "w0").to_json({}) == ["weight", "w0"]
    assert Arg("weight", "w0", 64).to_json({}) == ["weight", "w0", 64]
    assert Arg("kv", "3", 0, "v").to_json({}) == ["kv", 3, "v"]
    assert Arg("input", "positions").to_json({}) == ["input", "positions"]
    assert Arg("input", "block_tables", 256).to_json({}) == ["input", "block_tables", 256]
    assert NULL.to_json({}) == ["null"]


def test_plan_json() -> None:
    launch = Launch("norm", (Arg("value", "x"), Arg("weight", "w0"), NULL, Arg("value", "y")), "model.norm", ("x", "y"),
                    {"y": Write(3, ("L", 8), "f32")}, op="rms_norm")
    bucket = Bucket(4, (launch, Launch("last", ())), {"x": 0, "y": 64}, 128, 128, 160, {"logits": Output(64, 8, "f32")})
    kv = KvCache(16, 2048, (None, 512), (KvSlot(0, 2, 16, 8, "bf16", 1, 0, 1024),))
    plan = Plan(kv, {"w0": Weight("ab" * 32, 32, "norm", (8,), "fp32")}, (bucket,), {"model.norm": "y"})
    assert json.loads(json.dumps(plan.to_json())) == {
        "version": 5,
        "kv": {"block_size": 16, "block_bytes": 2048, "windows": [None, 512], "slots": [
            {"slot": 0, "heads": 2, "key_dim": 16, "value_dim": 8, "dtype": "bf16", "table": 1, "key_offset": 0,
             "value_offset": 1024}]},
        "weights": {"w0": {"blob": "ab" * 32, "size": 32, "label": "norm", "shape": [8], "scheme": "fp32"}},
        "buckets": [{
            "tokens": 4, "arena_bytes": 128, "outputs": {"logits": {"offset": 64, "width": 8, "dtype": "f32"}},
            "launches": [
                {"kernel": "norm", "args": [["arena", 0], ["weight", "w0"], ["null"], ["arena", 64]],
                 "op": "rms_norm", "origin": "model.norm",
                 "writes": {"y": {"arg": 3, "shape": ["L", 8], "dtype": "f32"}}},
                {"kernel": "last", "args": []}]}],
        "probes": {"model.norm": "y"}}
