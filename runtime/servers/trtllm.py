"""trtllm.TrtllmService: what TensorRT-LLM's own gRPC server speaks, token ids in and out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from smg_grpc_proto import trtllm_service_pb2 as pb

from ..devices.gpu_collective import num_ranks
from ..sampling import MAX_BAD_WORDS, Guide, SamplingParams
from .generation import begin, engine_for, raise_if_failed, sampling_params, tell_engine, token_ids
from .grpc_errors import InvalidField, Unsupported
from .kv_events import KvEventRelay, serve_kv_events
from .retention import parse_retention
from .tokenizer_archive import send_tokenizer
from .versions import runtime_version

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from ..executor.async_engine import OutputStream
    from ..executor.request import RequestOutput, TokenLogprobs
    from .context import ServerContext
    from .rpc import Call

SERVICE = pb.DESCRIPTOR.services_by_name["TrtllmService"]
ENDLESS = ("SubscribeKvEvents",)

NAMES = {
    "request_id": "request_id", "prompt_token_ids": "tokenized.input_token_ids", "max_tokens": "max_tokens",
    "n": "sampling_config.num_return_sequences", "stop": "stop", "stop_token_ids": "stop_token_ids",
    "bad_words": "bad", "bad_token_ids": "bad_token_ids", "logit_bias": "embedding_bias", "guide": "guided_decoding",
    "logprobs": "output_config.logprobs", "prompt_logprobs": "output_config.prompt_logprobs",
    "lora": "lora_config.task_id",
    **{name: f"sampling_config.{name}" for name in (
        "temperature", "top_k", "top_p", "min_p", "seed", "min_tokens", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "prompt_ignore_length")},
}
# Fields of sampling_config that the engine has by the same name.
_SAMPLING = ("top_k", "top_p", "min_p", "seed", "min_tokens", "repetition_penalty", "presence_penalty",
             "frequency_penalty", "prompt_ignore_length")
# Fields of things that the engine does not do -> the values with which they ask for nothing.
_NEUTRAL_SAMPLING: dict[str, tuple[float, ...]] = {
    "beam_width": (0, 1), "top_p_decay": (1,), "top_p_min": (), "top_p_reset_ids": (),
    "beam_search_diversity_rate": (0,), "length_penalty": (0, 1), "early_stopping": (0, 1),
    "no_repeat_ngram_size": (0,),
}
_UNSUPPORTED = ("prompt_tuning_config", "multimodal_input", "lookahead_config")
_UNSUPPORTED_OUTPUT = ("return_context_logits", "return_generation_logits", "return_encoder_output",
                       "return_perf_metrics")
_GUIDES = {
    pb.GuidedDecodingParams.GUIDE_TYPE_JSON: "json_object",
    pb.GuidedDecodingParams.GUIDE_TYPE_JSON_SCHEMA: "json_schema",
    pb.GuidedDecodingParams.GUIDE_TYPE_REGEX: "regex",
    pb.GuidedDecodingParams.GUIDE_TYPE_EBNF_GRAMMAR: "grammar",
}
_FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "cancelled"}


class TrtllmService:
    def __init__(self, context: ServerContext, relay: KvEventRelay | None) -> None:
        self._context = context
        self._relay = relay

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> None:
        _refuse_unsupported(request)
        with engine_for(self._context, call) as engine:
            params = _sampling_params(request, engine.vocab_size)
            retention = parse_retention(request.kv_cache_retention, "kv_cache_retention")
            salt = request.cache_salt_id if request.HasField("cache_salt_id") else None
            prompt = token_ids(request.tokenized.input_token_ids, engine.limits.max_seq_len)
            stream = await begin(self._context, engine, call, request.request_id, prompt, params, NAMES,
                                 cache_salt=salt, lora=_adapter(request), wants_text=False, **retention._asdict())
            try:
                await tell_engine(call, engine)
                await self._answer(request, stream, call)
            finally:
                await stream.aclose()

    async def _answer(self, request: pb.GenerateRequest, stream: OutputStream, call: Call) -> None:
        """A chunk an output if streaming; then each answer as a whole, when it ends."""
        answers = [pb.GenerateComplete(sequence_index=index)
                   for index in range(max(1, request.sampling_config.num_return_sequences))]
        keeps_stop, streams, request_id = request.include_stop_token_in_output, request.streaming, stream.request_id
        async for output in stream:
            if output.finish_reason is not None:
                raise_if_failed(output, NAMES)
                if not keeps_stop:
                    _drop_stop_token(output)
            answer = answers[output.index]
            answer.output_token_ids.extend(output.token_ids)
            logprobs = [_logprob(each) for each in output.logprobs or ()]
            answer.logprobs.extend(logprobs)
            if output.prompt_logprobs:
                answers[0].prompt_logprobs.extend(_logprob(each) for each in output.prompt_logprobs if each is not None)
            if streams and output.token_ids:
                await call.write(pb.GenerateResponse(request_id=request_id, chunk=pb.GenerateStreamChunk(
                    token_ids=output.token_ids, sequence_index=output.index, prompt_tokens=output.num_prompt_tokens,
                    completion_tokens=len(answer.output_token_ids), cached_tokens=output.num_cached_tokens,
                    logprobs=logprobs)))
            if output.finish_reason is not None:
                _complete(answer, output)
                await call.write(pb.GenerateResponse(request_id=request_id, complete=answer))

    async def HealthCheck(self, request: Message, call: Call) -> pb.HealthCheckResponse:
        health = self._context.health
        return pb.HealthCheckResponse(status="OK" if health == "serving" else f"the engine is {health}")

    async def Abort(self, request: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        if self._context.cancel(request.request_id):
            return pb.AbortResponse(success=True, message="cancelled")
        return pb.AbortResponse(message=f"no request {request.request_id!r} runs or waits")

    async def GetModelInfo(self, request: Message, call: Call) -> pb.GetModelInfoResponse:
        engine = self._context.current
        model = engine.file.manifest["model"]
        return pb.GetModelInfoResponse(
            model_id=self._context.model_name, max_input_len=engine.limits.max_seq_len - 1,
            max_seq_len=engine.limits.max_seq_len, max_batch_size=engine.limits.max_batch_size,
            vocab_size=engine.vocab_size, hidden_size=model.get("hidden_size", 0),
            num_layers=model.get("num_layers", 0), num_heads=model.get("num_heads", 0),
            supported_features=["guided_decoding", "kv_cache_retention", "cache_salt",
                                *(["lora"] if self._context.adapters.room is not None else [])])

    async def GetServerInfo(self, request: Message, call: Call) -> pb.GetServerInfoResponse:
        ranks = num_ranks(self._context.current.file)
        return pb.GetServerInfoResponse(version=runtime_version(), backend="ingot", tensor_parallel_size=ranks,
                                        pipeline_parallel_size=1, context_parallel_size=1, world_size=ranks)

    async def GetTokenizer(self, request: Message, call: Call) -> None:
        await send_tokenizer(self._context.current.file, call)

    async def SubscribeKvEvents(self, request: Any, call: Call) -> None:
        await serve_kv_events(self._relay, request, call)


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    """Raises Unsupported for the first field that asks for what the engine does not do."""
    for name in _UNSUPPORTED:
        if request.HasField(name):
            raise Unsupported(name, "is not supported by this engine")
    for name in ("weights", "config_json"):
        if getattr(request.lora_config, name):
            raise Unsupported(f"lora_config.{name}", "adapters do not come with requests; they are loaded before: "
                                                     "ingot.v1.Control/LoadAdapter")
    if request.tokenized.query_token_ids:
        raise Unsupported("tokenized.query_token_ids", "star attention is not supported")
    kind = pb.DisaggregatedParams.RequestType
    if request.disaggregated_params.request_type != kind.REQUEST_TYPE_CONTEXT_AND_GENERATION:
        raise Unsupported("disaggregated_params.request_type", "context and generation always run in one engine")
    config = request.sampling_config
    for field, value in config.ListFields():
        neutral = _NEUTRAL_SAMPLING.get(field.name)
        if neutral is not None and value not in neutral:
            raise Unsupported(f"sampling_config.{field.name}", f"{value:g} is not supported; leave it out")
    if any(width != 1 for width in config.beam_width_array):
        raise Unsupported("sampling_config.beam_width_array", "beam search is not supported")
    for name in _UNSUPPORTED_OUTPUT:
        if getattr(request.output_config, name):
            raise Unsupported(f"output_config.{name}", "is not supported by this engine")
    if request.HasField("arrival_time") and not math.isfinite(request.arrival_time):
        raise InvalidField("arrival_time", f"is {request.arrival_time}; expected seconds since 1970")


def _sampling_params(request: pb.GenerateRequest, vocab_size: int) -> SamplingParams:
    """Raises InvalidField or Unsupported."""
    config, output = request.sampling_config, request.output_config
    values: dict[str, Any] = {name: getattr(config, name) for name in _SAMPLING if config.HasField(name)}
    values |= {name: getattr(output, name) for name in ("logprobs", "prompt_logprobs") if output.HasField(name)}
    if config.HasField("temperature"):
        values["temperature"] = config.temperature
    elif config.HasField("top_k") or config.HasField("top_p"):
        values["temperature"] = 1.0  # as TensorRT-LLM: greedy only if nothing asks for sampling
    return sampling_params({
        **values, "max_tokens": request.max_tokens, "n": config.num_return_sequences or 1, "stop": tuple(request.stop),
        "stop_token_ids": tuple(request.stop_token_ids), "ignore_eos": request.ignore_eos,
        "include_stop": request.include_stop_token_in_output, "bad_words": tuple(request.bad),
        "bad_token_ids": tuple((token,) for token in request.bad_token_ids[:MAX_BAD_WORDS + 1]),
        "logit_bias": _embedding_bias(request, vocab_size), "guide": _guide(request),
    }, NAMES)


def _adapter(request: pb.GenerateRequest) -> str | None:
    """Task 7 is the adapter named "7"."""
    return str(request.lora_config.task_id) if request.HasField("lora_config") else None


def _embedding_bias(request: pb.GenerateRequest, vocab_size: int) -> dict[int, float]:
    bias = request.embedding_bias
    if len(bias) not in (0, vocab_size):
        raise InvalidField("embedding_bias", f"has {len(bias)} values; expected {vocab_size}, one a token")
    return {token: value for token, value in enumerate(bias) if value}


def _guide(request: pb.GenerateRequest) -> Guide | None:
    if not request.HasField("guided_decoding"):
        return None
    guided = request.guided_decoding
    kind = _GUIDES.get(guided.guide_type)
    if guided.guide_type == guided.GUIDE_TYPE_STRUCTURAL_TAG:
        raise Unsupported("guided_decoding.guide_type", "structural tags are not supported")
    if kind is None:
        raise InvalidField("guided_decoding.guide_type", f"is {guided.guide_type}; expected a GuideType of 1 to 4")
    if kind != "json_object" and not guided.guide:
        raise InvalidField("guided_decoding.guide", "is empty; expected the schema, pattern or grammar")
    return Guide(kind, guided.guide)


def _drop_stop_token(output: RequestOutput) -> None:
    """Takes out the token that ended the answer; one that completed a stop string is text and stays."""
    if output.finish_reason == "stop" and not isinstance(output.matched_stop, str) and output.token_ids:
        output.token_ids = output.token_ids[:-1]
        output.logprobs = output.logprobs and output.logprobs[:-1]


def _complete(answer: pb.GenerateComplete, output: RequestOutput) -> None:
    answer.finish_reason = _FINISH_REASONS[output.finish_reason or "stop"]
    answer.prompt_tokens = output.num_prompt_tokens
    answer.completion_tokens = len(answer.output_token_ids)
    answer.cached_tokens = output.num_cached_tokens
    if isinstance(output.matched_stop, str):
        answer.matched_stop_str = output.matched_stop
    elif output.matched_stop is not None:
        answer.matched_token_id = output.matched_stop


def _logprob(token: TokenLogprobs) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=token.token_id, logprob=token.logprob, top_logprobs=[
        pb.TopLogprob(token_id=top_id, logprob=logprob)
        for top_id, logprob in zip(token.top_ids, token.top_logprobs, strict=True)])
