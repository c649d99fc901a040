"""Rollback under load: clients stream from a server while its engine is changed again and again.

    python -m tools.bench.swap ENGINE ENGINE [--clients 32] [--swaps 20] [--json]
    python -m tools.bench.swap ENGINE --weights CHECKPOINT

Both engines must have the same tokenizer, and weights that differ clearly. With --weights the second is the first one
refitted with weights of that checkpoint to which noise is added. Each of the clients asks one prompt after the
other, greedily, all the time. Every second or so `ingot engines rollback prod --server ADDR` moves the server to the
other engine. Each answer must come from the engine whose hash it tells, from its first token to its last
(tools/bench/answer_check.py tells how that is checked, and how a near tie that fell otherwise is told from an answer of
two engines); none may fail. That the check notices mixed answers is tried each time: on the other engine's answers, and
on some that are put together from both. At last the server is asked for an engine that differs from one of them in its
self-test record only, and must keep what it has.

Told: seconds from the start of the command to the first token of a request that the other engine answers, as a client
sees it; what the server itself needed to load the engine and try it out; how long running answers paused; memory.
Exit status 1 if anything that has to hold does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
from grpc import aio
from smg_grpc_proto import trtllm_service_pb2 as pb

from ingot.compiler.engine_writer import EngineWriter
from ingot.compiler.refit import RefitRequest, refit
from ingot.compiler.self_test import self_test_of
from ingot.runtime.cli.output import table
from ingot.runtime.devices.plan_fields import vocab_size
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.engine_format import PLAN, SELF_TEST
from ingot.runtime.manifest import is_weight
from ingot.runtime.self_test import SelfTest
from ingot.runtime.servers.context import ENGINE_HASH
from ingot.runtime.servers.proto import control_pb2 as control
from ingot.runtime.store.lock_file import move_of
from ingot.runtime.store.store import Store

from .answer_check import Answer, AnswerCheck, spliced
from .overload import growth, resident_bytes
from .replicas import Server, serve

_GENERATE = "/trtllm.TrtllmService/Generate"
_STATUS = "/ingot.v1.Control/GetSwapStatus"
NAME = "prod"
PROBE_S = 0.05


@dataclass(frozen=True)
class Load:
    """What the clients ask: prompts of so many tokens, answers of so many."""

    clients: int = 32
    num_prompts: int = 16
    num_prompt_tokens: int = 32
    max_tokens: int = 48

    def prompts(self, vocab_size: int) -> list[list[int]]:
        return [[(7919 * (place + 131 * number) + 17) % vocab_size for place in range(self.num_prompt_tokens)]
                for number in range(self.num_prompts)]

    def request(self, prompt: Sequence[int], max_tokens: int | None = None) -> bytes:
        request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_token_ids=prompt), streaming=True,
                                     max_tokens=self.max_tokens if max_tokens is None else max_tokens, ignore_eos=True,
                                     output_config=pb.OutputConfig(logprobs=0))
        return bytes(request.SerializeToString())


@dataclass
class Seen:
    """What the clients saw.

    answers       (hash of the engine that it tells, number of its prompt, the answer); failed: by gRPC status
    untold        answers that tell no engine, or two
    gaps_s        between two tokens of an answer: (when it ended, how long it was)
    """

    answers: list[tuple[str, int, Answer]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    untold: int = 0
    gaps_s: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Swap:
    """first_token_s  from the start of the command to the first token of the other engine
    command_s       until the command had ended
    load_s, trial_s  of the server: the whole change, and of it trying the engine out
    """

    first_token_s: float
    command_s: float
    load_s: float
    trial_s: float
    trial: str


def with_record(engine: Path, record: SelfTest, path: Path) -> Path:
    """The engine with this self-test record; a file of its own hash."""
    with EngineFile.open(engine) as file, EngineWriter(path) as writer:
        manifest = {name: value for name, value in file.manifest.items() if name not in ("members", "format_version")}
        for name in file.members:
            if is_weight(name):
                writer.add_weight(file.read(name))
            elif name not in ("manifest.json", SELF_TEST):
                writer.add(name, file.read(name))
        assert PLAN in file.members
        writer.add(SELF_TEST, record.to_json())
        writer.finish(manifest)
    return path


def with_other_weights(engine: Path, checkpoint: Path, folder: Path) -> Path:
    """The engine of a model whose answers are others, but whose logits are no wilder: matrices, except those of the
    vocabulary, carry noise of half their standard deviation."""
    import torch
    from safetensors.torch import load_file, save_file

    changed = folder / "changed" / checkpoint.name
    shutil.copytree(checkpoint, changed)
    generator = torch.Generator().manual_seed(0)
    for path in changed.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and tensor.is_floating_point() and "embed" not in name and "head" not in name:
                noise = torch.randn(tensor.shape, generator=generator)
                tensors[name] = (tensor + 0.5 * tensor.float().std() * noise).to(tensor.dtype)
        save_file(tensors, path, {"format": "pt"})
    refit(RefitRequest(engine, str(changed), folder / "refitted.engine", calibrate=False))
    return folder / "refitted.engine"


@contextmanager
def checks(paths: Sequence[Path], load: Load) -> Iterator[dict[str, AnswerCheck]]:
    """Hash -> what tells its answers. Both engines are loaded while the block runs."""
    with ExitStack() as loaded:
        found = {}
        for path in paths:
            engine = loaded.enter_context(Engine.load(path, kv_cache_tokens=8192))
            found[engine.hash] = AnswerCheck(engine, load.prompts(engine.program.vocab_size), load.max_tokens)
        yield found


def noticed(found: Mapping[str, AnswerCheck], prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(planted mixed answers that are taken for such, all of them): each engine's answers under the other's name, and
    answers of two halves."""
    first, second = found.values()
    verdicts = []
    for one, other in ((first, second), (second, first)):
        for number, prompt in enumerate(prompts):
            verdicts.append(other.verdict(number, one.alone[number]))
            verdicts += [check.verdict(number, spliced(one, other, prompt, number)) for check in (one, other)]
    return verdicts.count("mixed"), len(verdicts)


class Clients:
    def __init__(self, channel: aio.Channel, load: Load, prompts: list[list[int]]) -> None:
        self.seen = Seen()
        self._call = channel.unary_stream(_GENERATE, None, pb.GenerateResponse.FromString)
        self._load = load
        self._prompts = prompts
        self._number = 0
        self._must_end = False

    async def run(self) -> None:
        """Until `end`; what runs then is waited for."""
        await asyncio.gather(*(self._client() for _ in range(self._load.clients)))

    def end(self) -> None:
        self._must_end = True

    async def _client(self) -> None:
        while not self._must_end:
            self._number += 1
            await self._ask(self._number % len(self._prompts))

    async def _ask(self, number: int) -> None:
        call = self._call(self._load.request(self._prompts[number]))
        answer = Answer((), ())
        last = 0.0
        try:
            told = _hash_in(await call.initial_metadata())
            async for response in call:
                if response.HasField("chunk"):
                    now = time.monotonic()
                    if last:
                        self.seen.gaps_s.append((now, now - last))
                    last = now
                else:
                    answer = Answer(tuple(response.complete.output_token_ids),
                                    tuple(row.logprob for row in response.complete.logprobs))
            is_told = bool(told) and told == _hash_in(await call.trailing_metadata())
        except aio.AioRpcError as error:
            self.seen.failed[error.code().name] += 1
            return
        if is_told:
            self.seen.answers.append((told, number, answer))
        else:
            self.seen.untold += 1

    async def first_token(self, engine_hash: str) -> float:
        """When (time.monotonic()) the first token of a new request came from this engine, which is taking over.

        A request every PROBE_S, whatever became of those before: those wait for their turn on the old engine.
        """
        came: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        probes: set[asyncio.Task[None]] = set()

        async def probe(number: int) -> None:
            call = self._call(self._load.request(self._prompts[number % len(self._prompts)], 1))
            try:
                if _hash_in(await call.initial_metadata()) != engine_hash:
                    return
                async for _ in call:
                    if not came.done():
                        came.set_result(time.monotonic())
                    return
            except aio.AioRpcError as error:
                self.seen.failed[error.code().name] += 1
            finally:
                call.cancel()

        number = 0
        while not came.done():
            number += 1
            probes.add(asyncio.create_task(probe(number)))
            await asyncio.wait((came,), timeout=PROBE_S)
        for task in probes:
            task.cancel()
        return came.result()


def _hash_in(metadata: object) -> str:
    return next((str(value) for key, value in metadata if key == ENGINE_HASH), "")  # type: ignore[attr-defined]


async def rollback(server: Server, store: Store, clients: Clients, to: str) -> Swap:
    """By the command, in a process of its own."""
    begin = time.monotonic()
    first_token = asyncio.create_task(clients.first_token(to))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ingot.runtime.cli", "engines", "rollback", NAME, "--server", server.grpc, "--json",
        "--store", str(store.folder), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    out, err = await process.communicate()
    command_s = time.monotonic() - begin
    if process.returncode:
        first_token.cancel()
        raise RuntimeError(f"the rollback failed: {err.decode()}")
    (done,) = json.loads(out)["servers"]
    return Swap(await first_token - begin, command_s, done["load_s"], done["trial_s"], done["trial"])


async def measure(server: Server, store: Store, hashes: list[str], prompts: list[list[int]], load: Load,
                  num_swaps: int, pause_s: float) -> tuple[Seen, dict[str, object], dict[str, bool]]:
    """(what the clients saw, figures, what had to hold and whether it did)"""
    async with aio.insecure_channel(server.grpc) as channel:
        clients = Clients(channel, load, prompts)
        running = asyncio.create_task(clients.run())
        await asyncio.sleep(pause_s * 3)
        quiet_until = time.monotonic()
        memory = [resident_bytes(server.process.pid)]
        swaps = []
        for number in range(num_swaps):
            swaps.append(await rollback(server, store, clients, hashes[(number + 1) % 2]))
            await asyncio.sleep(pause_s)
            memory.append(resident_bytes(server.process.pid))
        swapped_until = time.monotonic()
        broken = await _swap_to_broken(channel)
        await asyncio.sleep(pause_s)
        clients.end()
        await running
        ask = channel.unary_unary(_STATUS, None, control.SwapStatus.FromString)
        end = time.monotonic() + 20
        while len((status := await ask(b"")).engines) > 1 and time.monotonic() < end:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        memory.append(resident_bytes(server.process.pid))
    seen = clients.seen
    quiet = [gap for at, gap in seen.gaps_s if at < quiet_until]
    loud = [gap for at, gap in seen.gaps_s if quiet_until <= at < swapped_until]
    figures: dict[str, object] = {
        "swaps": len(swaps), "answers": len(seen.answers),
        "answers_by_engine": dict(Counter(told for told, _, _ in seen.answers)),
        "failed": dict(seen.failed), "without_their_hash": seen.untold,
        "first_token_s": _spread([swap.first_token_s for swap in swaps]),
        "command_s": _spread([swap.command_s for swap in swaps]),
        "load_s": _spread([swap.load_s for swap in swaps]), "trial_s": _spread([swap.trial_s for swap in swaps]),
        "trials": dict(Counter(swap.trial for swap in swaps)),
        "gap_between_tokens_ms": {"quiet": _tail_ms(quiet), "while_swapping": _tail_ms(loud)},
        "memory_mb": {"before": round(memory[0] / 1e6, 1), "highest": round(max(memory) / 1e6, 1),
                      "after": round(memory[-1] / 1e6, 1), "growth": round(growth(memory), 3)},
        "broken_engine": broken[1]}
    held = {"every request was answered": not seen.failed,
            "every answer tells its engine": seen.untold == 0,
            "both engines answered": {told for told, _, _ in seen.answers} == set(hashes),
            "a broken engine is refused": broken[0],
            "the running one stays": status.engines[0].hash == hashes[num_swaps % 2],
            "old engines are freed": len(status.engines) == 1, "the server lives": server.process.poll() is None}
    return seen, figures, held


def judge(seen: Seen, found: Mapping[str, AnswerCheck], prompts: Sequence[Sequence[int]],
          ) -> tuple[dict[str, object], dict[str, bool]]:
    """(figures, what had to hold): whether answers came from the engines that they name."""
    verdicts = Counter(found[told].verdict(number, answer) if told in found else "mixed"
                       for told, number, answer in seen.answers)
    planted, of_planted = noticed(found, prompts)
    figures: dict[str, object] = {
        "as_computed_alone": verdicts["as computed alone"], "near_ties": verdicts["a near tie fell otherwise"],
        "mixed": verdicts["mixed"], "planted_mixed_answers_noticed": f"{planted} of {of_planted}"}
    for name, of in (("measured_nats", "measured"), ("tolerance_nats", "tolerance")):
        figures[name] = {told: {key: float(f"{value:.3g}") for key, value in vars(getattr(check, of)).items()}
                         for told, check in found.items()}
    return figures, {"no answer is mixed": verdicts["mixed"] == 0, "mixed answers are noticed": planted == of_planted}


async def _swap_to_broken(channel: aio.Channel) -> tuple[bool, str]:
    load = channel.unary_unary("/ingot.v1.Control/LoadEngine", control.LoadEngineRequest.SerializeToString,
                               control.LoadEngineResponse.FromString)
    try:
        await load(control.LoadEngineRequest(engine="broken"))
    except aio.AioRpcError as error:
        refused = error.code() == grpc.StatusCode.FAILED_PRECONDITION and "recorded" in (error.details() or "")
        return refused, f"{error.code().name}: {error.details()}"
    return False, "it has taken over"


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def _tail_ms(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 2)
            for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


def prepare(first: Path, second: Path, folder: Path) -> tuple[Store, list[str], list[Path]]:
    """A store with both engines, each with a record of what it answers here, and one with a wrong record. The name
    means the first and has meant the second. (store, hashes, files)"""
    store = Store(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [with_record(path, self_test_of(path), folder / name)
             for path, name in ((first, "first.engine"), (second, "second.engine"))]
    right = self_test_of(second)
    moved = tuple((ids, tuple(value - 1.0 for value in values)) for ids, values in right.top)
    broken = with_record(second, replace(right, top=moved), folder / "broken.engine")
    hashes: list[str] = []
    for name, path in (("second", paths[1]), ("first", paths[0]), ("broken", broken)):
        with EngineFile.open(path) as file:
            store.add(file)
            store.lock.move(name, move_of(file.manifest, file.hash, "add", ""))
            if name != "broken":
                store.lock.move(NAME, move_of(file.manifest, file.hash, "pin" if hashes else "add", ""))
                hashes.append(file.hash)
    return store, hashes[::-1], paths


def main() -> int:
    parser = argparse.ArgumentParser("swap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", type=Path, nargs="+", metavar="ENGINE")
    parser.add_argument("--weights", type=Path, metavar="CHECKPOINT", help="the one that the engine was built from")
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=1.0, metavar="SECONDS", help="between two (default 1)")
    parser.add_argument("--kv-cache-tokens", type=int, default=16384)
    parser.add_argument("--no-prefix-reuse", action="store_true", help="prompts are computed each time")
    for name in ("clients", "num_prompts", "num_prompt_tokens", "max_tokens"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(Load, name))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    load = Load(arguments.clients, arguments.num_prompts, arguments.num_prompt_tokens, arguments.max_tokens)
    if len(arguments.engines) + (arguments.weights is not None) != 2:
        parser.error("give two engines, or one and --weights")
    with tempfile.TemporaryDirectory(prefix="ingot-swap-") as folder:
        first, *other = arguments.engines
        second = other[0] if other else with_other_weights(first, arguments.weights.resolve(), Path(folder))
        store, hashes, paths = prepare(first, second, Path(folder, "store"))
        options = ["--store", str(store.folder), "--kv-cache-tokens", str(arguments.kv_cache_tokens),
                   *(["--no-prefix-reuse"] if arguments.no_prefix_reuse else [])]
        with EngineFile.open(paths[0]) as file:
            prompts = load.prompts(vocab_size(file.plan))
        with serve(Path(NAME), *options) as server:
            seen, figures, held = asyncio.run(measure(server, store, hashes, prompts, load, arguments.swaps,
                                                      arguments.pause))
        with checks(paths, load) as found:
            more, also_held = judge(seen, found, prompts)
    figures, held = figures | more, held | also_held
    if arguments.json:
        print(json.dumps({"load": vars(load), **figures, "held": held}))
    else:
        print(table([(name, _shown(value)) for name, value in figures.items()]))
        print("\n".join(f"{'yes' if value else 'NO':<4} {name}" for name, value in held.items()))
    return 0 if all(held.values()) else 1


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{str(name)[:16]} {_shown(item)}" for name, item in value.items()) or "none"
    return str(value)


if __name__ == "__main__":
    os.environ.setdefault("INGOT_USER", "bench")
    sys.exit(main())
