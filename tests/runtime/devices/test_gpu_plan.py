"""The plan of a GPU engine: what is bound, and that nothing wrong ever becomes an address."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.devices.gpu_kernels import TensorMapType, check_members
from ingot.runtime.devices.gpu_plan import BoundTensorMap, GpuPlan, Place, Places
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.engine_format import EngineFormatError
from ingot.runtime.program import Limits
from ingot.runtime.step import StepLayout
from tests.runtime import mock_gpu_engine as mock

LIMITS = Limits(**mock.LIMITS)
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def plan(gpu_engine: Path) -> dict[str, Any]:
    with EngineFile.open(gpu_engine) as engine:
        return engine.plan


def launch_of(plan: dict[str, Any], op: str, bucket: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in plan["buckets"][bucket]["launches"] if entry["op"] == op)
    return found


def test_every_argument_gets_its_address(plan: dict[str, Any]) -> None:
    read = GpuPlan.read(plan, LIMITS)
    layout = StepLayout(LIMITS, read.vocab_size, read.kv.block_size, 1)
    inputs = {name: 5 << 40 | place.offset for name, place in layout.places.items()}
    weights = {name: (2 << 40) + (number << 32) for number, name in enumerate(read.weights)}
    bound = read.bind(Places(1 << 40, 3 << 40, weights, 4 << 40, inputs))
    assert [bucket.tokens for bucket in bound] == list(mock.BUCKETS)
    for bucket, entry in zip(bound, plan["buckets"], strict=True):
        assert bucket.logits == (1 << 40) + entry["outputs"]["logits"]["offset"]
        for launch, told in zip(bucket.launches, entry["launches"], strict=True):
            assert launch.kernel.symbol == told["kernel"] and list(launch.grid) == told["grid"]
            assert len(launch.arguments) == len(launch.kernel.parameters) == len(told["args"])
            for argument, arg in zip(launch.arguments, told["args"], strict=True):
                if arg[0] == "tensormap":
                    assert isinstance(argument, BoundTensorMap) and isinstance(argument.type, TensorMapType)
                    assert (list(argument.shape), argument.stride) == (arg[2], arg[3])
                    argument, arg = argument.address, arg[1]
                space = {"arena": 1 << 40, "workspace": 3 << 40}.get(arg[0])
                if space is not None:
                    assert argument == space + arg[1]
                else:
                    assert argument == (weights if arg[0] == "weight" else inputs)[arg[1]]
    maps = [argument for bucket in bound for launch in bucket.launches for argument in launch.arguments
            if isinstance(argument, BoundTensorMap)]
    assert maps and all(one.type.dtype == "bf16" and max(one.type.box) <= 256 for one in maps)
    assert read.zeroed_bytes == 256 and read.workspace_bytes > 256
    assert {name: weight.size for name, weight in read.weights.items()} == {
        name: data.nbytes for name, data in mock.WEIGHTS.items()}


def edited(launch: str, position: int, value: Any, bucket: int = 0) -> Change:
    """Another argument of a launch."""
    def change(plan: dict[str, Any]) -> None:
        launch_of(plan, launch, bucket)["args"][position] = value
    return change


def kernel(**fields: Any) -> Change:
    """Other fields of the kernel that embeds."""
    def change(plan: dict[str, Any]) -> None:
        plan["kernels"][launch_of(plan, "embedding")["kernel"]].update(fields)
    return change


def tensor_map(position: int, value: Any) -> Change:
    """Another part of the first tensor map of a long step's launches."""
    def change(plan: dict[str, Any]) -> None:
        entry = launch_of(plan, "linear", 1)
        next(arg for arg in entry["args"] if arg[0] == "tensormap")[position] = value
    return change


def of_maps(field: str, value: Any) -> Change:
    def change(plan: dict[str, Any]) -> None:
        entry = next(entry for entry in plan["kernels"].values() if entry["tensor_maps"])
        entry["tensor_maps"][0][field] = value
    return change


def put(value: Any, *path: str | int) -> Change:
    def change(plan: dict[str, Any]) -> None:
        target: Any = plan
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
    return change


LAUNCH, ARGUMENT = r"plan\.buckets\[0\]\.launches\[0\] \(embedding\w*\): ", "argument ids, .* is wrong: "
KERNEL = r"plan\.kernels\.embedding\w*: "

WRONG: dict[str, tuple[Change, str]] = {
    # what an argument points to
    "arena beyond its end": (edited("embedding", 2, ["arena", 1 << 20]), LAUNCH + "argument y, .*outside its"),
    "arena before its beginning": (edited("embedding", 2, ["arena", -16]), LAUNCH + "argument y, .*outside its"),
    "arena not aligned": (edited("embedding", 2, ["arena", 8]), "offset 8 is not aligned to 16"),
    "an offset that is a float": (edited("embedding", 2, ["arena", 16.0]), "offset 16.0 is outside"),
    "an offset that is true": (edited("embedding", 2, ["arena", True]), "offset True is outside"),
    "no such weight": (edited("embedding", 1, ["weight", "tabel"]), "argument w, .*there is no 'tabel'"),
    "weight beyond its end": (edited("embedding", 1, ["weight", "table", 40960]), "outside its 40960 bytes"),
    "no such input": (edited("embedding", 0, ["input", "token_idz"]), LAUNCH + ARGUMENT + "there is no 'token_idz'"),
    "an input of another type": (edited("embedding", 0, ["input", "sampling.bias_values"]),
                                 r"takes \*i32, this is \*fp32"),
    "no such slot": (edited("embedding", 0, ["kv", 3, "k"]), "there is no"),
    "no such part of a slot": (edited("embedding", 0, ["kv", 0, "q"]), r"takes \*i32, this is \*bf16"),
    "scales that a slot lacks": (edited("linear", 0, ["kv", 0, "k_scale"]), r"takes \*bf16, this is \*fp32"),
    "a pointer of another type than the cache": (edited("embedding", 0, ["kv", 0, "k"]), r"takes \*i32, this is"),
    "workspace beyond its end": (edited("linear", -1, ["workspace", 1 << 24]), "outside its"),
    "a number where a pointer is taken": (edited("embedding", 0, ["scalar", 3]), "since it is a pointer"),
    "an unknown kind": (edited("embedding", 0, ["host", 0]),
                        "expected arena, workspace, weight, kv, input, lora, peers or null"),
    "ranks that are not there": (edited("embedding", 0, ["peers"]), "argument ids, .*the engine is for one GPU"),
    "a slot without room": (edited("embedding", 1, ["lora", 0]), "argument w, .*the engine has no room for adapters"),
    "adapters that are no truth value": (put(1, "buckets", 0, "launches", 0, "adapters"), "adapters: expected bool"),
    "an empty argument": (edited("embedding", 0, []), LAUNCH + ARGUMENT),
    "an argument that is a number": (edited("embedding", 0, 7), LAUNCH + ARGUMENT),
    "an argument without a name": (edited("embedding", 0, ["weight"]), LAUNCH + ARGUMENT),
    "a name that cannot be one": (edited("embedding", 0, ["weight", ["table"]]), LAUNCH + ARGUMENT),
    # tensor maps
    "a pointer where a tensor map is taken": (edited("linear", 0, ["arena", 0], 1), "expected .\"tensormap\""),
    "more rows than there are": (tensor_map(2, [1 << 20, 128]), "rows of 256 bytes reach beyond its"),
    "rows closer than they are wide": (tensor_map(3, 120), "no rectangle"),
    "rows that are not aligned": (tensor_map(3, 129), "rows of 258 bytes are not aligned to 16"),
    "no rows": (tensor_map(2, [0, 128]), "no rectangle"),
    "a tensor map over nothing": (tensor_map(1, ["null"]), "reach beyond its 0"),
    "a tensor map without extents": (tensor_map(2, 5), "is wrong"),
    # launches
    "no such kernel": (put("embed", "buckets", 0, "launches", 0, "kernel"), r"kernel 'embed' is not among"),
    "too few arguments": (put([], "buckets", 0, "launches", 0, "args"), "0 arguments; the kernel takes 4: ids, w, y"),
    "a grid of nothing": (put([4, 0, 1], "buckets", 0, "launches", 0, "grid"), "grid: expected three counts"),
    "a grid that is too deep": (put([4, 1, 65536], "buckets", 0, "launches", 0, "grid"), "grid: expected three"),
    "a grid of two axes": (put([4, 1], "buckets", 0, "launches", 0, "grid"), "grid: expected three counts"),
    "no grid": (put(None, "buckets", 0, "launches", 0, "grid"), "grid: expected list, got None"),
    "a value in an argument that is not there": (
        put({"x": {"arg": 4, "shape": ["T"], "dtype": "bf16"}}, "buckets", 0, "launches", 0, "writes"),
        "writes.x: arg: expected 0 to 3, got 4"),
    # buckets, workspace, weights
    "logits beyond the arena": (put(1 << 20, "buckets", 0, "outputs", "logits", "offset"), "do not fit the arena"),
    "logits of another type": (put("bf16", "buckets", 1, "outputs", "logits", "dtype"), "element type 'bf16'"),
    "logits of several widths": (put(80, "buckets", 1, "outputs", "logits", "width"), "different widths"),
    "buckets that shrink": (put(16, "buckets", 0, "tokens"), r"plan\.buckets: sizes \[16, 16\]"),
    "no workspace": (put(None, "workspace"), r"plan: workspace: expected dict"),
    "more zeros than workspace": (put(1 << 30, "workspace", "zeroed_bytes"), r"plan\.workspace: zeroed_bytes: expec"),
    "no signals": (put(-1, "workspace", "signal_bytes"), r"plan\.workspace: signal_bytes: expected at least 0"),
    "a weight of no size": (put(0, "weights", "table", "size"), r"plan\.weights\.table: size: expected at least 1"),
    "a weight without a blob": (put(3, "weights", "table", "blob"), r"plan\.weights\.table: blob: expected str"),
    "no blob for any rank": (put([], "weights", "table", "blobs"), r"plan\.weights\.table: blobs"),
    # kernels
    "no kernels": (put(None, "kernels"), r"plan: kernels: expected dict"),
    "code elsewhere": (kernel(code="weights/x.cubin"), KERNEL + "code: expected a member below code/"),
    "code outside of the engine": (kernel(code="code/../../x"), "member name 'code/../../x' is not allowed"),
    "an entry that is no name": (kernel(entry="a b"), KERNEL + "entry: expected an identifier"),
    "too many threads": (kernel(threads=2048), KERNEL + "threads: expected 32 to 1024, got 2048"),
    "threads that fill no warp": (kernel(threads=100), KERNEL + "threads: expected a multiple of 32, got 100"),
    "more shared memory than any device has": (kernel(shared_bytes=1 << 20), KERNEL + "shared_bytes: expected 0 to"),
    "a cluster of nothing": (kernel(cluster=0), KERNEL + "cluster: expected 1 to 16, got 0"),
    "scratch memory": (kernel(scratch_bytes=128), KERNEL + "its blocks ask for 128 bytes of scratch memory"),
    "a source outside of the plugins": (kernel(module="os.path"), KERNEL + "module: expected one below ingot.plugins"),
    "a source that climbs": (kernel(module="ingot.plugins..os"), KERNEL + "module: expected one below"),
    "a source without its hash": (kernel(source_sha256="12"), KERNEL + "source_sha256: expected 64"),
    "a constant that is a list": (kernel(constants={"N": [1]}), KERNEL + "constants.N: expected a number"),
    "a parameter without a type": (kernel(parameters=[["ids"]]), r"parameters\[0\]: expected a name and a type"),
    "an unknown element type": (kernel(parameters=[["ids", "*f8"]]), r"parameters\[0\]: type '\*f8' of ids is unknown"),
    "a parameter that stands twice": (kernel(parameters=[["ids", "*i32"], ["ids", "*i32"]]), "ids stands twice"),
    "a tensor map that the code does not have": (
        kernel(tensor_maps=[{}]), KERNEL + "tensor_maps: there are more than parameters"),
    "a tensor map that the code does not tell of": (
        kernel(parameters=[["ids", {"tensormap": "bf16", "block": [64, 64]}]]), r"tensor_maps\[0\]: swizzle"),
    "a tensor map of an unknown type": (
        kernel(parameters=[["ids", {"tensormap": "bf17", "block": [64, 64]}]]), "element type 'bf17' is unknown"),
    "a piece of nothing": (of_maps("block_size", [0, 64]), "block_size: expected extents of 1 to 256"),
    "a piece that is too long": (of_maps("block_size", [512, 64]), "block_size: expected extents of 1 to 256"),
    "an unknown swizzle": (of_maps("swizzle", 99), "swizzle: expected 0 to 15, got 99"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_is_wrong_is_told(plan: dict[str, Any], name: str) -> None:
    change, message = WRONG[name]
    wrong = copy.deepcopy(plan)
    change(wrong)
    with pytest.raises(EngineFormatError, match=message):
        GpuPlan.read(wrong, LIMITS)


def test_scalars_fit_their_type(plan: dict[str, Any]) -> None:
    """No kernel of the mock takes one: the table's pointer becomes a number."""
    def with_scalar(kind: str, arg: Any) -> GpuPlan:
        changed = copy.deepcopy(plan)
        kernel(parameters=[["ids", "*i32"], ["w", kind], ["y", "*bf16"], ["sizes", "*i32"]])(changed)
        for bucket in (0, 1):
            edited("embedding", 1, arg, bucket)(changed)
        return GpuPlan.read(changed, LIMITS)

    for kind, value in (("i32", -(2**31)), ("i32", 2**31 - 1), ("i64", 2**63 - 1), ("fp32", 0.5), ("fp32", 3)):
        launch = with_scalar(kind, ["scalar", value]).buckets[0].launches[0]
        assert launch.arguments[1] == value and type(launch.arguments[1]) is (float if kind == "fp32" else int)
    for kind, arg in (("i32", ["scalar", 2**31]), ("i32", ["scalar", 1.0]), ("i32", ["scalar", True]),
                      ("fp32", ["scalar", "1"]), ("fp32", ["scalar", True]), ("i64", ["scalar", 2**63]),
                      ("i32", ["arena", 0]), ("i32", ["scalar"]), ("i32", ["scalar", 1, 2]), ("i32", [])):
        with pytest.raises(EngineFormatError, match=r"argument w, .* is wrong"):
            with_scalar(kind, arg)


def test_null_and_kv_and_ranks(plan: dict[str, Any]) -> None:
    changed = copy.deepcopy(plan)
    blob = changed["weights"]["table"]["blob"]
    changed["weights"]["table"] = {"blobs": [blob, "b" * 64], "size": 40960}
    edited("linear", 0, ["kv", 0, "v", 32])(changed)
    edited("embedding", 0, ["null"])(changed)
    read = GpuPlan.read(changed, LIMITS)
    assert read.weights["table"].blobs == (blob, "b" * 64)
    embed, linear = read.buckets[0].launches[:2]
    assert embed.arguments[0] == Place("null") and linear.arguments[0] == Place("kv", (0, "v"), 32, 1024 - 32)
    layout = StepLayout(LIMITS, read.vocab_size, read.kv.block_size, 1)
    places = Places(0, 0, dict.fromkeys(read.weights, 0), 1 << 20, dict.fromkeys(layout.places, 0))
    bound = read.bind(places)[0].launches
    assert bound[0].arguments[0] == 0 and bound[1].arguments[0] == (1 << 20) + 1024 + 32


def test_members_that_are_missing(plan: dict[str, Any]) -> None:
    kernels = GpuPlan.read(plan, LIMITS).kernels
    members = {entry.code: 100 for entry in kernels.values()}
    check_members(kernels, members)
    symbol, first = next(iter(kernels.items()))
    for sizes in ({**members, first.code: 0}, {name: size for name, size in members.items() if name != first.code}):
        with pytest.raises(EngineFormatError, match=rf"plan\.kernels\.{symbol}: the engine has no member {first.code}"):
            check_members(kernels, sizes)
    changed = copy.deepcopy(plan)
    kernel(module="generated.0123456789abcdef")(changed)
    with pytest.raises(EngineFormatError, match=r"no member code/generated\.0123456789abcdef\.py"):
        check_members(GpuPlan.read(changed, LIMITS).kernels, members)


def test_no_plan_is_believed(plan: dict[str, Any]) -> None:
    """Any value of it may be anything: it is refused with the path to it, or is as good as the one before."""
    def paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
        if path:
            yield path
        if isinstance(value, (dict, list)):
            for key in value if isinstance(value, dict) else range(len(value)):
                yield from paths(value[key], (*path, key))

    junk: list[Any] = [None, True, -1, 0, 1 << 70, 1.5, float("inf"), "", "x", [], [[]], {}, {"x": {}}]
    everywhere = list(paths(plan))
    rng = random.Random(0)
    refused = 0
    for _ in range(1500):
        wrong = copy.deepcopy(plan)
        path = rng.choice(everywhere)
        put(rng.choice(junk), *path)(wrong)
        try:
            GpuPlan.read(wrong, LIMITS)
        except EngineFormatError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{path}: {type(error).__name__}: {error}") from error
    assert refused > 800
