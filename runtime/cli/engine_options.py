"""The options of every verb that runs an engine with an executor: `ingot serve`, `ingot bench`."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from ..errors import RequestError

if TYPE_CHECKING:
    from ..engine import Engine
    from ..engine_file import EngineFile
    from ..executor.loading import EngineOptions


def add_engine_argument(parser: argparse.ArgumentParser, name: str = "engine", **settings: Any) -> None:
    """A positional argument that says which engine, and --store."""
    parser.add_argument(name, help="engine: a file, a name in the store, or the start of a hash", **settings)
    add_store_argument(parser)


def add_store_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", metavar="FOLDER", help="the engine store (default: $INGOT_STORE, else engines/)")


def open_engine(arguments: argparse.Namespace, name: str = "engine") -> EngineFile:
    """The engine that such an argument names."""
    from ..store import locate

    return locate.open_engine(getattr(arguments, name), arguments.store)


def add_device_argument(parser: Any) -> None:
    """--device, of every verb that runs an engine."""
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:NUMBER, or emulator, which runs an engine "
                        "for GPUs on the CPU, slowly (default: what the engine was built for)")


def add_lora_argument(parser: argparse.ArgumentParser) -> None:
    """--lora, of verbs that answer for one user."""
    parser.add_argument("--lora", metavar="PATH", help="a LoRA adapter that PEFT saved; PATH@sha256:HASH: only if this "
                                                       "is its content")


def load_adapter(engine: Engine, lora: str | None) -> str | None:
    """The adapter that --lora names; what requests call it."""
    if lora is None:
        return None
    from ..adapters.source import AdapterSource

    name, equals, path = lora.partition("=")
    if equals and "/" not in name and not os.path.exists(name + equals + path.partition("@")[0]):
        raise RequestError(f"--lora {lora}: expected the adapter's folder alone, for there is one: --lora {path}\n"
                           "  Names are for ingot serve.")
    return engine.adapters.load("lora", AdapterSource.parse(lora).read(engine.adapters.room)).name


def add_speculation_argument(parser: Any) -> None:
    """--speculative-tokens, likewise."""
    parser.add_argument("--speculative-tokens", type=int, default=0, metavar="K",
                        help="draft up to K tokens an answer from what prompt and answer hold already, and verify them "
                             "in one step (default 0: off)")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    from ..scheduler import ChunkingPolicy, SchedulerPolicy

    allowed = parser.add_argument_group("which engines may be loaded")
    allowed.add_argument("--require-hash", action="append", default=[], metavar="HASH",
                         help="only one of this hash; may be repeated: one of these")
    allowed.add_argument("--require-signature", action="append", default=[], metavar="KEY",
                         help="only one signed by the key whose public half is this PEM file; may be repeated")
    group = parser.add_argument_group("how the engine runs")
    add_device_argument(group)
    group.add_argument("--scheduler-policy", choices=list(SchedulerPolicy.__members__), default="GUARANTEED_NO_EVICT",
                       help="GUARANTEED_NO_EVICT (default): a request starts only if it can run to its end; "
                            "MAX_UTILIZATION: it starts as soon as there is room for its next step, and may be paused; "
                            "STATIC_BATCH: a batch runs to its end before the next one starts")
    group.add_argument("--context-chunking", choices=list(ChunkingPolicy.__members__),
                       default="FIRST_COME_FIRST_SERVED", help="how a step's tokens are divided among long prompts")
    group.add_argument("--max-batch-size", type=int, metavar="N", help="at most what the engine was built for")
    group.add_argument("--max-num-tokens", type=int, metavar="N", help="tokens in a step; likewise")
    group.add_argument("--max-seq-len", type=int, metavar="N", help="tokens of prompt and answer; likewise")
    group.add_argument("--max-queue-size", type=int, default=512, metavar="N",
                       help="requests that may wait; more are refused (default 512)")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--kv-cache-fraction", type=float, metavar="F", help="of the device's memory that is free beside "
                      "weights and arena (default 0.5 of the machine's memory, 0.9 of a GPU's)")
    size.add_argument("--kv-cache-tokens", type=int, metavar="N", help="room of the KV cache, instead")
    host = group.add_mutually_exclusive_group()
    host.add_argument("--host-cache-fraction", type=float, metavar="F", help="the same for the tier in host memory")
    host.add_argument("--host-kv-tokens", type=int, default=0, metavar="N", help="room of that tier (default 0: none)")
    group.add_argument("--no-prefix-reuse", action="store_true", help="compute every prompt as a whole")
    add_speculation_argument(group)
    group.add_argument("--num-workers", type=int, metavar="N", help="threads of a CPU engine (default: physical cores)")
    group.add_argument("--log-requests", metavar="FILE", help="a line of JSON for each request; -: standard error")


def engine_options(arguments: argparse.Namespace) -> EngineOptions:
    from ..executor.loading import EngineOptions
    from ..scheduler import ChunkingPolicy, SchedulerPolicy
    from ..store.policy import LoadPolicy

    return EngineOptions(
        device=arguments.device, scheduler_policy=SchedulerPolicy[arguments.scheduler_policy],
        context_chunking=ChunkingPolicy[arguments.context_chunking],
        max_batch_size=arguments.max_batch_size, max_num_tokens=arguments.max_num_tokens,
        max_seq_len=arguments.max_seq_len, max_queue_size=arguments.max_queue_size,
        kv_cache_tokens=arguments.kv_cache_tokens, kv_cache_fraction=arguments.kv_cache_fraction,
        host_kv_tokens=arguments.host_kv_tokens, host_cache_fraction=arguments.host_cache_fraction,
        prefix_reuse=not arguments.no_prefix_reuse, speculative_tokens=arguments.speculative_tokens,
        num_workers=arguments.num_workers,
        log_requests=arguments.log_requests, store=arguments.store,
        policy=LoadPolicy.of(arguments.require_hash, arguments.require_signature))
