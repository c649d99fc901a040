"""ingot.v1.Control: what operates an engine (proto/control.proto)."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from ..adapters.errors import AdapterError
from ..adapters.source import AdapterSource, check_sha256
from .grpc_errors import InvalidField, Unsupported
from .metrics_text import render
from .proto import control_pb2 as pb
from .swap import SwapRequest
from .tokenizer_archive import tokenizer_archive
from .versions import runtime_version

if TYPE_CHECKING:
    from ..adapters.loaded import LoadedAdapter
    from ..executor.recorder import Histogram
    from .context import ServerContext
    from .rpc import Call
    from .served import ServedEngine
    from .swap import Swapper

SERVICE = pb.DESCRIPTOR.services_by_name["Control"]
_HEALTH = {"serving": pb.Statistics.HEALTH_SERVING, "draining": pb.Statistics.HEALTH_DRAINING,
           "failed": pb.Statistics.HEALTH_FAILED, "stopped": pb.Statistics.HEALTH_STOPPED}
_MAX_DRAIN_S = 1e7
_TRIALS = {"none": pb.LoadEngineResponse.TRIAL_NONE, "recorded": pb.LoadEngineResponse.TRIAL_RECORDED,
           "smoke": pb.LoadEngineResponse.TRIAL_SMOKE, "returned": pb.LoadEngineResponse.TRIAL_RETURNED}
_PHASES = {"idle": pb.SwapStatus.PHASE_IDLE, "checking": pb.SwapStatus.PHASE_CHECKING,
           "loading": pb.SwapStatus.PHASE_LOADING}


class Control:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._begin = time.monotonic()

    async def GetEngineInfo(self, request: pb.GetEngineInfoRequest, call: Call) -> pb.EngineInfo:
        engine = self._context.current
        manifest, stats, archive = engine.file.manifest, engine.engine.stats(), tokenizer_archive(engine.file)
        return pb.EngineInfo(
            hash=engine.hash, model_name=self._context.model_name, architecture=manifest["model"]["architecture"],
            target=manifest["target"]["name"], precision=manifest["precision"], ingot_version=runtime_version(),
            built_by=manifest["ingot_version"], tokenizer_sha256=hashlib.sha256(archive).hexdigest() if archive else "",
            limits=pb.Limits(
                max_batch_size=engine.limits.max_batch_size, max_num_tokens=engine.limits.max_num_tokens,
                max_seq_len=engine.limits.max_seq_len, max_queue_size=stats.max_queue_size,
                vocab_size=engine.vocab_size),
            kv_cache=pb.KvCache(
                block_size=stats.block_size, num_blocks=stats.num_blocks, num_host_blocks=stats.num_host_blocks,
                bytes_per_token=manifest["memory"].get("kv_bytes_per_token", 0),
                guaranteed_requests=stats.guaranteed_requests))

    async def Drain(self, request: pb.DrainRequest, call: Call) -> pb.DrainResponse:
        timeout_s = request.timeout_s if request.HasField("timeout_s") else None
        if timeout_s is not None and not 0 <= timeout_s <= _MAX_DRAIN_S:
            raise InvalidField("timeout_s", f"is {timeout_s}; expected 0 to {_MAX_DRAIN_S:g} seconds")
        return pb.DrainResponse(completed=await self._context.drain(timeout_s))

    async def GetStatistics(self, request: pb.GetStatisticsRequest, call: Call) -> pb.Statistics:
        stats, totals = self._context.stats(), self._context.totals()
        recorder, kv = totals.recorder, totals.kv
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

    async def LoadEngine(self, request: pb.LoadEngineRequest, call: Call) -> pb.LoadEngineResponse:
        if not request.engine:
            raise InvalidField("engine", "is empty; expected a name, or the start of a hash, in the server's store")
        return await self._swap(request.engine, 1, request.options)

    async def RollbackEngine(self, request: pb.RollbackEngineRequest, call: Call) -> pb.LoadEngineResponse:
        return await self._swap(None, request.steps or 1, request.options)

    async def _swap(self, engine: str | None, steps: int, options: pb.LoadOptions) -> pb.LoadEngineResponse:
        tokens = options.kv_cache_tokens if options.HasField("kv_cache_tokens") else None
        host_tokens = options.host_kv_tokens if options.HasField("host_kv_tokens") else None
        if tokens == 0:
            raise InvalidField("options.kv_cache_tokens", "is 0; expected at least 1")
        report = await self._swapper().swap(SwapRequest(
            engine, steps, options.if_serving or None, tokens, host_tokens, options.allow_other_tokenizer))
        return pb.LoadEngineResponse(
            hash_before=report.before, hash=report.after, trial=_TRIALS[report.tried], wait_s=report.wait_s,
            load_s=report.load_s, trial_s=report.trial_s, kv_cache_tokens=report.kv_cache_tokens,
            wanted_kv_tokens=report.wanted_kv_tokens, num_finishing=report.num_finishing)

    async def GetSwapStatus(self, request: pb.GetSwapStatusRequest, call: Call) -> pb.SwapStatus:
        context, swapper = self._context, self._swapper()
        return pb.SwapStatus(
            engines=[_loaded(engine) for engine in (context.current, *context.finishing)],
            phase=_PHASES[swapper.phase], loading=swapper.loading, history=swapper.history,
            results=dict(context.swaps), last_error=swapper.last_error)

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, call: Call) -> pb.Adapter:
        for name in ("name", "path"):
            if not getattr(request, name):
                raise InvalidField(name, "is empty")
        if request.sha256:
            try:
                check_sha256(request.sha256, "sha256")
            except AdapterError as error:
                raise InvalidField("sha256", str(error)) from None
        source = AdapterSource(request.path, request.sha256 or None)
        return _adapter(await self._context.adapters.load(request.name, source))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, call: Call) -> pb.Adapter:
        return _adapter(await self._context.adapters.unload(request.name))

    async def ListAdapters(self, request: pb.ListAdaptersRequest, call: Call) -> pb.AdapterList:
        room = self._context.adapters.room
        listed = pb.AdapterList(adapters=map(_adapter, self._context.adapters.all()))
        if room is not None:
            listed.max_rank, listed.num_slots = room.max_rank, room.max_adapters
            listed.bytes_per_slot = room.bytes_per_adapter
        return listed

    def _swapper(self) -> Swapper:
        if self._context.swapper is None:
            raise Unsupported("engine", "this server keeps the engine that it was started with")
        return self._context.swapper


def _loaded(engine: ServedEngine) -> pb.LoadedEngine:
    manifest = engine.file.manifest
    return pb.LoadedEngine(hash=engine.hash, target=manifest["target"]["name"], precision=manifest["precision"],
                           num_requests=len(engine.engine.request_ids),
                           kv_cache_tokens=engine.facts.get("kv_cache_tokens", 0))


def _adapter(loaded: LoadedAdapter) -> pb.Adapter:
    adapter = loaded.adapter
    return pb.Adapter(name=loaded.name, sha256=adapter.sha256, rank=adapter.rank, num_modules=len(adapter.modules))


def _duration(histogram: Histogram) -> pb.Duration:
    return pb.Duration(count=histogram.total, total_s=histogram.sum)
