"""inference.GRPCInferenceService: KServe v2 as Triton's clients speak it, text or token ids in and out."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import IngotError
from ..executor.request import RequestOutput
from .generation import FieldNames, begin, encode, engine_for, raise_if_failed
from .grpc_errors import InvalidField, NotFound, details
from .kserve_request import INPUTS, OUTPUTS, InferRequest, parse_infer
from .kserve_tensors import add_output
from .proto import kserve_v2_pb2 as pb
from .versions import runtime_version

if TYPE_CHECKING:
    from ..executor.async_engine import OutputStream
    from ..executor.recorder import Histogram
    from .context import ServerContext
    from .rpc import Call, Stopping
    from .served import ServedEngine

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]

_VERSION = "1"
_PLATFORM = "ingot"
_EXTENSIONS = ("model_repository", "model_configuration", "statistics")
_CONFIG_TYPES = {"BYTES": pb.TYPE_STRING, **{name.removeprefix("TYPE_"): value for name, value in pb.DataType.items()}}
_NANOSECONDS = 1e9


class GRPCInferenceService:
    def __init__(self, context: ServerContext, stopping: Stopping) -> None:
        self._context = context
        self._stopping = stopping

    async def ServerLive(self, request: pb.ServerLiveRequest, call: Call) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, call: Call) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, call: Call) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._is_ready and self._is_served(request.name, request.version))

    async def ServerMetadata(self, request: pb.ServerMetadataRequest,
                             call: Call) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name=_PLATFORM, version=runtime_version(), extensions=_EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, call: Call) -> pb.ModelMetadataResponse:
        self._check_model("name", request.name, "version", request.version)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=self._context.model_name, versions=[_VERSION], platform=_PLATFORM,
            inputs=[tensor(name=name, datatype=each.types[0], shape=[-1 if each.is_list else 1])
                    for name, each in INPUTS.items()],
            outputs=[tensor(name=name, datatype=datatype, shape=[-1 if _is_list(name) else 1])
                     for name, datatype in OUTPUTS.items()])

    async def ModelConfig(self, request: pb.ModelConfigRequest, call: Call) -> pb.ModelConfigResponse:
        self._check_model("name", request.name, "version", request.version)
        engine = self._context.current
        facts = {"engine_hash": engine.hash, "precision": engine.file.manifest["precision"],
                 "target": engine.file.manifest["target"]["name"], "max_seq_len": str(engine.limits.max_seq_len),
                 "max_batch_size": str(engine.limits.max_batch_size)}
        return pb.ModelConfigResponse(config=pb.ModelConfig(
            name=self._context.model_name, platform=_PLATFORM, backend=_PLATFORM,
            input=[pb.ModelInput(name=name, data_type=_CONFIG_TYPES[each.types[0]], dims=[-1 if each.is_list else 1],
                                 optional=True) for name, each in INPUTS.items()],
            output=[pb.ModelOutput(name=name, data_type=_CONFIG_TYPES[datatype], dims=[-1 if _is_list(name) else 1])
                    for name, datatype in OUTPUTS.items()],
            parameters={name: pb.ModelParameter(string_value=value) for name, value in facts.items()},
            model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True)))

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest,
                              call: Call) -> pb.ModelStatisticsResponse:
        if request.name:
            self._check_model("name", request.name, "version", request.version)
        recorder = self._context.totals().recorder
        finished, queue, whole = recorder.requests_finished, recorder.queue_time, recorder.request_time
        succeeded = finished["stop"] + finished["length"]
        return pb.ModelStatisticsResponse(model_stats=[pb.ModelStatistics(
            name=self._context.model_name, version=_VERSION, inference_count=succeeded, execution_count=recorder.steps,
            inference_stats=pb.InferStatistics(
                success=pb.StatisticDuration(count=succeeded, ns=_nanoseconds(whole)),
                fail=pb.StatisticDuration(count=finished["error"] + finished["timeout"] + finished["cancelled"]),
                queue=pb.StatisticDuration(count=queue.total, ns=_nanoseconds(queue)),
                compute_infer=pb.StatisticDuration(count=whole.total,
                                                   ns=max(0, _nanoseconds(whole) - _nanoseconds(queue)))))])

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest,
                              call: Call) -> pb.RepositoryIndexResponse:
        if request.ready and not self._is_ready:
            return pb.RepositoryIndexResponse()
        health = self._context.health
        return pb.RepositoryIndexResponse(models=[pb.RepositoryIndexResponse.ModelIndex(
            name=self._context.model_name, version=_VERSION, state="READY" if self._is_ready else "UNAVAILABLE",
            reason="" if self._is_ready else f"the engine is {health}")])

    async def ModelInfer(self, request: pb.ModelInferRequest, call: Call) -> pb.ModelInferResponse:
        with engine_for(self._context, call) as engine:
            infer = self._parse(request, engine)
            if infer.stream:
                raise InvalidField(infer.names["stream"], "an answer in pieces needs ModelStreamInfer")
            stream = await self._begin(infer, engine, call)
            answer = _Answer(infer.names)
            try:
                async for output in stream:
                    answer.add(output)
            finally:
                await stream.aclose()
            return self._response(request, infer, engine, answer)

    async def ModelStreamInfer(self, requests: AsyncIterator[pb.ModelInferRequest], call: Call) -> None:
        malformed = None
        lock = asyncio.Lock()
        async with asyncio.TaskGroup() as running:
            try:
                while (request := await self._stopping.or_result(anext(requests, None), None)) is not None:
                    running.create_task(self._answer_one(request, call, lock))
            except IngotError as error:
                malformed = error  # what has been asked before is answered first
        if malformed is not None:
            raise malformed

    async def _answer_one(self, request: pb.ModelInferRequest, call: Call, lock: asyncio.Lock) -> None:
        """One request of a stream; what is wrong with it becomes an error_message."""
        with self._context.use() as engine:
            try:
                infer = self._parse(request, engine)
                stream = await self._begin(infer, engine, call)
                answer = _Answer(infer.names)
                try:
                    async for output in stream:
                        answer.add(output)
                        if infer.stream or output.finish_reason is not None:
                            response = pb.ModelStreamInferResponse(
                                infer_response=self._response(request, infer, engine, answer))
                            async with lock:
                                await call.write(response)
                            answer.forget_pieces()
                finally:
                    await stream.aclose()
            except IngotError as error:
                response = pb.ModelStreamInferResponse(
                    error_message=details(error),
                    infer_response=pb.ModelInferResponse(model_name=request.model_name, id=request.id))
                async with lock:
                    await call.write(response)

    def _parse(self, request: pb.ModelInferRequest, engine: ServedEngine) -> InferRequest:
        self._check_model("model_name", request.model_name, "model_version", request.model_version)
        return parse_infer(request, engine.tokenizer is not None)

    async def _begin(self, infer: InferRequest, engine: ServedEngine, call: Call) -> OutputStream:
        if infer.input_ids is not None:
            prompt = infer.input_ids
        else:
            prompt = await encode(engine, infer.text or "", infer.names["text_input"])
        # Ids of this protocol need not be unique: they only come back with the answer.
        return await begin(self._context, engine, call, f"kserve-{uuid.uuid4().hex}", prompt, infer.params, infer.names,
                           priority=infer.priority, cache_salt=infer.cache_salt, lora=infer.lora)

    def _response(self, request: pb.ModelInferRequest, infer: InferRequest, engine: ServedEngine,
                  answer: _Answer) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(model_name=self._context.model_name, model_version=_VERSION, id=request.id)
        for name in infer.outputs:
            add_output(response, name, OUTPUTS[name], answer.tensor(name), infer.raw)
        response.parameters["engine_hash"].string_param = engine.hash
        if infer.marks_final:
            response.parameters["triton_final_response"].bool_param = answer.finish_reason is not None
        return response

    @property
    def _is_ready(self) -> bool:
        return self._context.health == "serving"

    def _is_served(self, name: str, version: str) -> bool:
        return name == self._context.model_name and version in ("", _VERSION)

    def _check_model(self, name_field: str, name: str, version_field: str, version: str) -> None:
        served = self._context.model_name
        if name != served:
            raise NotFound(f"{name_field}: there is no model {name[:80]!r}; this server has {served!r}")
        if version not in ("", _VERSION):
            raise NotFound(f"{version_field}: there is no version {version[:80]!r}; expected {_VERSION!r}, or none")


@dataclass
class _Answer:
    """What has come of one answer since the last response. names: where its request has what it asks for."""

    names: FieldNames
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sum_log_probs: float = 0.0
    finish_reason: str | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        """Raises what the answer failed by."""
        if output.finish_reason is not None:
            raise_if_failed(output, self.names)
            self.finish_reason = output.finish_reason
        self.text.append(output.text)
        self.token_ids += output.token_ids
        self.num_input_tokens, self.num_output_tokens = output.num_prompt_tokens, output.num_output_tokens
        for token in output.logprobs or ():
            self.log_probs.append(token.logprob)
            self.sum_log_probs += token.logprob

    def forget_pieces(self) -> None:
        self.text, self.token_ids, self.log_probs = [], [], []

    def tensor(self, name: str) -> list[Any]:
        match name:
            case "text_output":
                return ["".join(self.text).encode()]
            case "output_ids":
                return self.token_ids
            case "finish_reason":
                return [(self.finish_reason or "").encode()]
            case "num_input_tokens":
                return [self.num_input_tokens]
            case "num_output_tokens":
                return [self.num_output_tokens]
            case "output_log_probs":
                return self.log_probs
            case _:
                return [self.sum_log_probs]


def _is_list(output: str) -> bool:
    return output in ("output_ids", "output_log_probs")


def _nanoseconds(histogram: Histogram) -> int:
    return int(histogram.sum * _NANOSECONDS)
