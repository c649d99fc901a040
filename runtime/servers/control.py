"""ingot.v1.Control: what operates an engine (proto/control.proto)."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from .grpc_errors import InvalidField
from .metrics_text import render
from .proto import control_pb2 as pb
from .tokenizer_archive import tokenizer_archive
from .versions import runtime_version

if TYPE_CHECKING:
    from ..executor.recorder import Histogram
    from .context import ServerContext
    from .rpc import Call

SERVICE = pb.DESCRIPTOR.services_by_name["Control"]
_HEALTH = {"serving": pb.Statistics.HEALTH_SERVING, "draining": pb.Statistics.HEALTH_DRAINING,
           "failed": pb.Statistics.HEALTH_FAILED, "stopped": pb.Statistics.HEALTH_STOPPED}
_MAX_DRAIN_S = 1e7


class Control:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._begin = time.monotonic()

    async def GetEngineInfo(self, request: pb.GetEngineInfoRequest, call: Call) -> pb.EngineInfo:
        context, manifest, stats = self._context, self._context.file.manifest, self._context.engine.stats()
        archive = tokenizer_archive(context.file)
        return pb.EngineInfo(
            hash=context.file.hash, model_name=context.model_name, architecture=manifest["model"]["architecture"],
            target=manifest["target"]["name"], precision=manifest["precision"], ingot_version=runtime_version(),
            built_by=manifest["ingot_version"], tokenizer_sha256=hashlib.sha256(archive).hexdigest() if archive else "",
            limits=pb.Limits(
                max_batch_size=context.limits.max_batch_size, max_num_tokens=context.limits.max_num_tokens,
                max_seq_len=context.limits.max_seq_len, max_queue_size=stats.max_queue_size,
                vocab_size=context.vocab_size),
            kv_cache=pb.KvCache(
                block_size=stats.block_size, num_blocks=stats.num_blocks, num_host_blocks=stats.num_host_blocks,
                bytes_per_token=manifest["memory"].get("kv_bytes_per_token", 0),
                guaranteed_requests=stats.guaranteed_requests))

    async def Drain(self, request: pb.DrainRequest, call: Call) -> pb.DrainResponse:
        timeout_s = request.timeout_s if request.HasField("timeout_s") else None
        if timeout_s is not None and not 0 <= timeout_s <= _MAX_DRAIN_S:
            raise InvalidField("timeout_s", f"is {timeout_s}; expected 0 to {_MAX_DRAIN_S:g} seconds")
        return pb.DrainResponse(completed=await self._context.engine.drain(timeout_s))

    async def GetStatistics(self, request: pb.GetStatisticsRequest, call: Call) -> pb.Statistics:
        engine = self._context.engine
        stats, recorder, kv = engine.stats(), engine.recorder, engine.kv_stats
        return pb.Statistics(
            health=_HEALTH[stats.health], uptime_s=time.monotonic() - self._begin,
            num_running=stats.num_running, num_waiting=stats.num_waiting, num_paused=stats.num_paused,
            num_used_blocks=stats.num_used_blocks, num_cached_blocks=stats.num_cached_blocks,
            num_free_blocks=stats.num_free_blocks, num_used_host_blocks=stats.num_used_host_blocks,
            requests_received=recorder.requests_received, requests_finished=dict(recorder.requests_finished.items()),
            requests_refused=dict(recorder.requests_refused), requests_paused=recorder.requests_paused,
            steps=recorder.steps, prompt_tokens=recorder.prompt_tokens, generated_tokens=recorder.generated_tokens,
            computed_tokens=recorder.computed_tokens,
            prefix_cache=pb.PrefixCache(query_tokens=kv.queried_tokens, hit_tokens=kv.hit_tokens,
                                        miss_tokens=dict(kv.miss_tokens), evicted_blocks=kv.evicted_blocks),
            queue_time=_duration(recorder.queue_time), inter_token_latency=_duration(recorder.inter_token_latency),
            time_to_first_token={use: _duration(each) for use, each in recorder.time_to_first_token.items()})

    async def GetMetrics(self, request: pb.GetMetricsRequest, call: Call) -> pb.Metrics:
        return pb.Metrics(text=render(self._context))


def _duration(histogram: Histogram) -> pb.Duration:
    return pb.Duration(count=histogram.total, total_s=histogram.sum)
