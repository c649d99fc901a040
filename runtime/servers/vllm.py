"""vllm.grpc.engine.VllmEngine: what vLLM's gRPC server speaks to gateways, token ids out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from ..sampling import Guide, SamplingParams
from ..tokenizer import read_config
from .generation import FieldNames, begin, encode, engine_for, raise_if_failed, sampling_params, tell_engine, token_ids
from .grpc_errors import InvalidField, Unsupported
from .kv_events import KvEventRelay, serve_kv_events
from .loads import Throughput
from .tokenizer_archive import send_tokenizer
from .versions import runtime_version

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from ..executor.async_engine import OutputStream
    from ..executor.request import RequestOutput, TokenLogprobs
    from .context import ServerContext
    from .rpc import Call
    from .served import ServedEngine

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"]
ENDLESS = ("SubscribeKvEvents",)

_SAME = ("min_p", "frequency_penalty", "presence_penalty", "top_k", "min_tokens", "ignore_eos", "skip_special_tokens")
NAMES = {
    "request_id": "request_id", "prompt_token_ids": "tokenized.input_ids",
    "include_stop": "sampling_params.include_stop_str_in_output",
    **{name: f"sampling_params.{name}" for name in (
        *_SAME, "temperature", "top_p", "repetition_penalty", "max_tokens", "stop", "stop_token_ids", "n", "logprobs",
        "prompt_logprobs", "seed", "logit_bias")},
}
_UNSUPPORTED = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs", "media_refs")
_FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}
_FLUSH_POLL_S = 0.02


class VllmEngine:
    def __init__(self, context: ServerContext, relay: KvEventRelay | None) -> None:
        self._context = context
        self._relay = relay
        self._begin = time.monotonic()
        self._last_request = 0.0
        self._throughput = Throughput(lambda: context.totals().recorder.generated_tokens)

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> None:
        self._last_request = time.time()
        _refuse_unsupported(request)
        with engine_for(self._context, call) as engine:
            prompt = await self._prompt(request, engine)
            params = _sampling_params(request.sampling_params, engine.default_len - len(prompt))
            names = {**NAMES, "guide": f"sampling_params.{request.sampling_params.WhichOneof('constraint')}"}
            stream = await begin(self._context, engine, call, request.request_id, prompt, params, names,
                                 wants_text=False)
            try:
                await tell_engine(call, engine)
                await self._answer(request, prompt, stream, call, names)
            finally:
                await stream.aclose()

    async def _prompt(self, request: pb.GenerateRequest, engine: ServedEngine) -> Sequence[int]:
        params, longest = request.sampling_params, engine.limits.max_seq_len
        prompt: Sequence[int] = request.tokenized.input_ids
        if request.WhichOneof("input") == "text":
            prompt = await encode(engine, request.text, "text")
        if params.HasField("truncate_prompt_tokens"):
            kept = longest - 1 if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
            if kept < 1:
                raise InvalidField("sampling_params.truncate_prompt_tokens", f"is {kept}; expected 1 or more, or -1")
            prompt = prompt[-kept:]
        return token_ids(prompt, longest)

    async def _answer(self, request: pb.GenerateRequest, prompt: Sequence[int], stream: OutputStream, call: Call,
                      names: FieldNames) -> None:
        """A chunk an output if streaming; then each answer as a whole, when it ends."""
        answers = [pb.GenerateComplete(index=index) for index in range(max(1, request.sampling_params.n))]
        prompt_logprobs = None
        async for output in stream:
            if output.finish_reason is not None:
                raise_if_failed(output, names)
            answer = answers[output.index]
            answer.output_ids.extend(output.token_ids)
            logprobs = _output_logprobs(output.logprobs)
            if logprobs is not None:
                answer.output_logprobs.MergeFrom(logprobs)
            if output.prompt_logprobs:
                prompt_logprobs = _input_logprobs(prompt, output.prompt_logprobs)
                answers[0].input_logprobs.CopyFrom(prompt_logprobs)
            if request.stream and output.token_ids:
                # A chunk counts its own tokens: gateways add them up.
                await call.write(pb.GenerateResponse(chunk=pb.GenerateStreamChunk(
                    token_ids=output.token_ids, prompt_tokens=output.num_prompt_tokens,
                    completion_tokens=len(output.token_ids), cached_tokens=output.num_cached_tokens,
                    output_logprobs=logprobs, input_logprobs=prompt_logprobs, index=output.index)))
                prompt_logprobs = None
            if output.finish_reason is not None:
                _complete(answer, output)
                await call.write(pb.GenerateResponse(complete=answer))

    async def HealthCheck(self, request: Message, call: Call) -> pb.HealthCheckResponse:
        health = self._context.health
        return pb.HealthCheckResponse(healthy=health == "serving", message=f"the engine is {health}")

    async def Abort(self, request: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        for request_id in request.request_ids:
            self._context.cancel(request_id)
        return pb.AbortResponse()

    async def FlushCache(self, request: common_pb2.FlushCacheRequest,
                         call: Call) -> common_pb2.FlushCacheResponse:
        if not 0 <= request.timeout_s < float("inf"):
            raise InvalidField("timeout_s", f"is {request.timeout_s}; expected seconds, 0 or more")
        end = time.monotonic() + request.timeout_s
        while not await self._context.current.engine.flush_cache():
            if time.monotonic() >= end:
                return common_pb2.FlushCacheResponse(message="requests hold KV blocks; nothing was flushed")
            await asyncio.sleep(_FLUSH_POLL_S)
        return common_pb2.FlushCacheResponse(success=True, message="flushed")

    async def GetModelInfo(self, request: Message, call: Call) -> pb.GetModelInfoResponse:
        name, engine = self._context.model_name, self._context.current
        config = read_config(engine.file)
        max_len, defaults = engine.limits.max_seq_len, config.get("generation", {})
        return pb.GetModelInfoResponse(
            model_path=name, served_model_name=name, is_generation=True,
            max_context_length=max_len, max_req_input_len=max_len - 1, vocab_size=engine.vocab_size,
            architectures=[engine.file.manifest["model"]["architecture"]],
            eos_token_ids=sorted(engine.stop_token_ids), bos_token_id=config.get("bos_token_id") or 0,
            default_sampling_params_json=json.dumps(defaults, separators=(",", ":")) if defaults else "")

    async def GetServerInfo(self, request: Message, call: Call) -> pb.GetServerInfoResponse:
        context = self._context
        stats, manifest = context.stats(), context.current.file.manifest
        return pb.GetServerInfoResponse(
            active_requests=stats.num_running + stats.num_waiting + stats.num_paused,
            is_paused=stats.health != "serving", last_receive_timestamp=self._last_request,
            uptime_seconds=time.monotonic() - self._begin, server_type="ingot-grpc", data_parallel_size=1,
            kv_cache_dtype=str(manifest.get("kv_precision", "")), block_size=stats.block_size,
            model_dtype=manifest["precision"], max_num_seqs=stats.max_batch_size,
            constrained_decoding_start="first_token")

    async def GetLoads(self, request: pb.GetLoadsRequest, call: Call) -> pb.GetLoadsResponse:
        if request.dp_rank:
            raise InvalidField("dp_rank", f"is {request.dp_rank}; this engine has rank 0 only")
        stats, kv = self._context.stats(), self._context.totals().kv
        load = pb.SchedulerLoad(
            num_running_reqs=stats.num_running, num_waiting_reqs=stats.num_waiting + stats.num_paused,
            num_total_reqs=stats.num_running + stats.num_waiting + stats.num_paused,
            num_used_tokens=stats.num_used_blocks * stats.block_size,
            max_total_num_tokens=stats.num_blocks * stats.block_size, token_usage=stats.kv_cache_usage,
            gen_throughput=self._throughput.per_second(),
            cache_hit_rate=kv.hit_tokens / kv.queried_tokens if kv.queried_tokens else 0.0,
            utilization=stats.num_running / stats.max_batch_size, max_running_requests=stats.max_batch_size)
        return pb.GetLoadsResponse(timestamp=datetime.now(UTC).isoformat(), version=runtime_version(),
                                   dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request: Message, call: Call) -> None:
        await send_tokenizer(self._context.current.file, call)

    async def SubscribeKvEvents(self, request: Any, call: Call) -> None:
        await serve_kv_events(self._relay, request, call)


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    for field, _ in request.ListFields():
        if field.name in _UNSUPPORTED:
            raise Unsupported(field.name, "is not supported by this engine")
    if request.data_parallel_rank:
        raise InvalidField("data_parallel_rank", f"is {request.data_parallel_rank}; this engine has rank 0 only")


def _sampling_params(params: pb.SamplingParams, room: int) -> SamplingParams:
    """room: tokens that an answer can have at most. Raises InvalidField or Unsupported.

    Fields without presence are unset at 0; where 0 would be a value of its own, unset means vLLM's default."""
    values: dict[str, Any] = {name: getattr(params, name) for name in _SAME}
    values |= {name: getattr(params, name) for name in ("logprobs", "prompt_logprobs") if params.HasField(name)}
    if params.HasField("seed") and params.seed != -1:
        values["seed"] = params.seed % (1 << 64)
    return sampling_params({
        **values, "temperature": params.temperature if params.HasField("temperature") else 1.0,
        "top_p": params.top_p or 1.0, "repetition_penalty": params.repetition_penalty or 1.0, "n": params.n or 1,
        "max_tokens": params.max_tokens if params.HasField("max_tokens") else max(1, room),
        "stop": tuple(params.stop), "stop_token_ids": tuple(params.stop_token_ids),
        "include_stop": params.include_stop_str_in_output, "logit_bias": dict(params.logit_bias),
        "guide": _guide(params),
    }, NAMES)


def _guide(params: pb.SamplingParams) -> Guide | None:
    kind = params.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not params.json_object):
        return None
    if kind == "structural_tag":
        raise Unsupported("sampling_params.structural_tag", "structural tags are not supported")
    if kind == "choice":
        choices = tuple(params.choice.choices)
        if not choices or "" in choices:
            raise InvalidField("sampling_params.choice.choices", "expected one or more texts, none of them empty")
        return Guide("choice", choices=choices)
    if kind == "json_object":
        return Guide("json_object")
    text = getattr(params, kind)
    if not text:
        raise InvalidField(f"sampling_params.{kind}", "is empty")
    return Guide(kind, text)


def _complete(answer: pb.GenerateComplete, output: RequestOutput) -> None:
    answer.finish_reason = _FINISH_REASONS[output.finish_reason or "stop"]
    answer.prompt_tokens = output.num_prompt_tokens
    answer.completion_tokens = output.num_output_tokens
    answer.cached_tokens = output.num_cached_tokens
    if isinstance(output.matched_stop, str):
        answer.matched_stop_str = output.matched_stop
    elif output.matched_stop is not None:
        answer.matched_token_id = output.matched_stop


def _output_logprobs(logprobs: list[TokenLogprobs] | None) -> pb.OutputLogProbs | None:
    if not logprobs:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[each.logprob for each in logprobs], token_ids=[each.token_id for each in logprobs],
        top_logprobs=[_top(each) for each in logprobs])


def _input_logprobs(prompt: Sequence[int], logprobs: list[TokenLogprobs | None]) -> pb.InputLogProbs:
    """The first token of a prompt has none."""
    return pb.InputLogProbs(
        token_ids=prompt,
        token_logprobs=[pb.InputTokenLogProb(value=None if each is None else each.logprob) for each in logprobs],
        top_logprobs=[pb.TopLogProbs() if each is None else _top(each) for each in logprobs])


def _top(token: TokenLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=token.top_logprobs, token_ids=token.top_ids)
