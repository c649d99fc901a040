"""Engines divided among GPUs give the tokens of the whole one."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.gpu.generate import generate
from ingot.compiler.passes.pipeline import gpu_pipeline, run_passes
from ingot.compiler.precision import find_precision
from ingot.runtime.devices.gpu_collective import check_exchanges, most_blocks
from ingot.runtime.devices.gpu_kernels import Kernel
from ingot.runtime.devices.gpu_plan import Bucket, GpuPlan, Launch, Place, Weight
from ingot.runtime.devices.plan_fields import KvLayout
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.engine_format import EngineFormatError
from ingot.runtime.errors import RequestError
from ingot.runtime.program import Limits
from ingot.runtime.sampling import SamplingParams
from tests.compiler.models import Layer, model

from .programs import gpu
from .test_generate import plan_of

KERNEL = Kernel("sum", "code/sum.cubin", "one_shot", 128, 64, 1,
                (("source", "*bf16"), ("destination", "*bf16"), ("peers", "*i64"), ("sizes", "*i32")),
                "ingot.plugins.all_reduce.gpu", "one_shot", (("RANKS", 2),), 4, 1, "")
PLACES = (Place("arena", None, 0, 64), Place("arena", None, 64, 64), Place("peers", None, 0, 40),
          Place("input", "sizes", 0, 16))


def of_one_launch(launch: Launch, weights: dict[str, Weight], signal_bytes: int = 256) -> GpuPlan:
    """Of one launch."""
    kv = KvLayout((), 16, 16, {})
    return GpuPlan({launch.kernel.symbol: launch.kernel}, kv, weights, 128, 0, 0, signal_bytes, 8,
                   (Bucket(1, (launch,), 0, 1),))


@pytest.mark.parametrize(("change", "message"), [
    ({"grid": (5, 1, 1)}, "signals of 256 bytes, 64 for each block"), ({"grid": (1, 2, 1)}, "grid"),
    ({"arguments": (Place("weight", "w", 0, 64), *PLACES[1:])}, "source: .* must be a place in arena"),
    ({"arguments": (*PLACES[:2], Place("null"), PLACES[3])}, "peers: .* must be a place in peers"),
    ({"kernel": replace(KERNEL, constants=(("RANKS", 4),))}, "for 4 ranks; the engine has 2"),
    ({"weights": {"w": Weight(("a", "b", "c"), 16)}}, "3 blobs; expected one, or one for each of 2 ranks")])
def test_exchanges_that_are_none(change: dict[str, Any], message: str) -> None:
    weights = {"w": Weight(("a", "b"), 16), "all": Weight(("c",), 16)}
    good = Launch(KERNEL, (4, 1, 1), PLACES, "all_reduce", "", {})
    check_exchanges(of_one_launch(good, weights), 2)
    assert most_blocks(of_one_launch(good, weights)) == 4
    weights |= change.pop("weights", {})
    with pytest.raises(EngineFormatError, match=message):
        check_exchanges(of_one_launch(replace(good, **change), weights), 2)


@pytest.mark.parametrize(("target", "ranks", "message"), [
    ("cpu", 2, "only engines for GPUs"), ("h200", 3, "expected 1, 2")])
def test_builds_that_cannot_be_divided(target: str, ranks: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(BuildRequest("nowhere", target, "bf16", tensor_parallel=ranks))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_norm_is_made_with_the_sum_before_it(precision: str) -> None:
    """In one launch where there are few rows, behind it where there are many; but for the last one, which is a
    matrix's. What is planned is what the runtime takes."""
    chosen, h200 = find_precision(precision, gpu("h200")), gpu("h200")
    graph = run_passes(model([Layer(), Layer()]), gpu_pipeline(chosen, "bf16", num_ranks=2))
    limits = {"max_batch_size": 4, "max_num_tokens": 4096, "max_seq_len": 4096}
    made = generate(graph, h200, chosen.floats, limits, 16)
    plan = GpuPlan.read(plan_of(made), Limits(**limits), num_ranks=2)
    check_exchanges(plan, 2)
    assert 0 < most_blocks(plan) <= h200.num_sms
    for bucket in plan.buckets:
        ops = [launch.op for launch in bucket.launches if launch.kernel.exchanges]
        assert ops == [*3 * ["all_reduce+add_rms_norm"], "all_reduce", "all_gather"]
        names = [launch.kernel.function for launch in bucket.launches]
        assert names.count("one_shot_norm") == (3 if bucket.tokens <= 128 else 0)


PROMPTS = [[5, 17, 99, 3, 250, 7], [400, 2, 2, 81], [12]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_tokens_are_those_of_one_gpu(kind: str, tmp_path: Path) -> None:
    """Sums over ranks are rounded elsewhere than those within one: logits differ by roundings, tokens do not."""
    from tools.small_models import save_random, small_config

    save_random(small_config(kind, hidden_size=128, head_dim=32), tmp_path / kind)
    tokens, sizes = {}, {}
    for ranks in (1, 2, 4):
        request = BuildRequest(str(tmp_path / kind), "h200", "bf16", tmp_path / f"{ranks}.engine", max_batch_size=4,
                               max_num_tokens=8, max_seq_len=64)
        result = build(replace(request, tensor_parallel=ranks))
        assert result.manifest.get("tensor_parallel", 1) == ranks
        sizes[ranks] = result.manifest["memory"]["weights_bytes"]
        with EngineFile.open(tmp_path / f"{ranks}.engine") as file:
            divided = [weight for weight in file.plan["weights"].values() if "blobs" in weight]
            assert all(len(weight["blobs"]) == ranks for weight in divided)
            assert bool(divided) == (ranks > 1)
            names = {launch["op"] for bucket in file.plan["buckets"] for launch in bucket["launches"]}
            assert ({"all_reduce", "all_gather"} <= names) == (ranks > 1)
            assert bool(file.plan["workspace"]["signal_bytes"]) == (ranks > 1)
        engine = Engine.load(tmp_path / f"{ranks}.engine", device="emulator")
        answers = engine.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        tokens[ranks] = [list(answer.token_ids) for answer in answers]
        engine.close()
    assert tokens[2] == tokens[1] and tokens[4] == tokens[1]
    assert sizes[4] < sizes[2] < sizes[1]
