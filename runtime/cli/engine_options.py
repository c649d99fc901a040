"""The options of every verb that runs an engine with an executor: `ingot serve`, `ingot bench`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..executor.loading import EngineOptions


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    from ..kv_memory import DEFAULT_FRACTION
    from ..scheduler import ChunkingPolicy, SchedulerPolicy

    group = parser.add_argument_group("how the engine runs")
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
    size.add_argument("--kv-cache-fraction", type=float, default=DEFAULT_FRACTION, metavar="F",
                      help=f"of the memory that is free beside weights and arena (default {DEFAULT_FRACTION})")
    size.add_argument("--kv-cache-tokens", type=int, metavar="N", help="room of the KV cache, instead")
    host = group.add_mutually_exclusive_group()
    host.add_argument("--host-cache-fraction", type=float, metavar="F", help="the same for the tier in host memory")
    host.add_argument("--host-kv-tokens", type=int, default=0, metavar="N", help="room of that tier (default 0: none)")
    group.add_argument("--no-prefix-reuse", action="store_true", help="compute every prompt as a whole")
    group.add_argument("--num-workers", type=int, metavar="N", help="threads of a CPU engine (default: physical cores)")
    group.add_argument("--log-requests", metavar="FILE", help="a line of JSON for each request; -: standard error")


def engine_options(arguments: argparse.Namespace) -> EngineOptions:
    from ..executor.loading import EngineOptions
    from ..scheduler import ChunkingPolicy, SchedulerPolicy

    return EngineOptions(
        scheduler_policy=SchedulerPolicy[arguments.scheduler_policy],
        context_chunking=ChunkingPolicy[arguments.context_chunking],
        max_batch_size=arguments.max_batch_size, max_num_tokens=arguments.max_num_tokens,
        max_seq_len=arguments.max_seq_len, max_queue_size=arguments.max_queue_size,
        kv_cache_tokens=arguments.kv_cache_tokens, kv_cache_fraction=arguments.kv_cache_fraction,
        host_kv_tokens=arguments.host_kv_tokens, host_cache_fraction=arguments.host_cache_fraction,
        prefix_reuse=not arguments.no_prefix_reuse, num_workers=arguments.num_workers,
        log_requests=arguments.log_requests)
