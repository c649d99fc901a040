"""An engine in this process: no server, no protocol, the same executor."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

from ...errors import IngotError
from ...executor.loading import EngineOptions, LoadedEngine
from ...executor.request import Draining, EngineFailed, QueueFull, Request
from ...sampling import SamplingParams
from ...servers.context import ServerContext, ServerSettings
from ...servers.metrics_text import render
from ...servers.served import ServedEngine
from .driver import CallFailed, Delivery, Facts, Refused


class InProcessDriver:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def facts(self) -> Facts:
        engine = self._context.current
        manifest = engine.file.manifest
        settings = {"target": manifest["target"]["name"], "precision": manifest["precision"], **engine.facts}
        return Facts("in process", self._context.model_name, engine.hash, engine.vocab_size,
                     engine.limits.max_seq_len, engine.engine.stats().block_size, settings)

    async def generate(self, request_id: str, prompt: list[int] | str,
                       output_tokens: int) -> AsyncGenerator[Delivery, None]:
        if isinstance(prompt, str):
            tokenizer = self._context.current.tokenizer
            if tokenizer is None:
                raise CallFailed("the engine has no tokenizer: the data set must hold input_ids")
            prompt = await asyncio.to_thread(tokenizer.encode, prompt)
        try:
            stream = self._context.current.engine.generate(
                Request(request_id, prompt, SamplingParams(max_tokens=output_tokens, ignore_eos=True)))
        except (QueueFull, Draining, EngineFailed) as error:
            raise Refused(f"{type(error).__name__}: {error}") from None
        except IngotError as error:
            raise CallFailed(f"{type(error).__name__}: {error}") from None
        async with aclosing(stream):
            async for output in stream:
                yield Delivery(len(output.token_ids), output.token_ids, output.num_prompt_tokens,
                               output.num_cached_tokens)
                if output.finish_reason not in (None, "stop", "length"):
                    raise CallFailed(f"{output.finish_reason}: {output.error or 'no reason given'}")

    async def metrics(self) -> str | None:
        return render(self._context)

    async def close(self) -> None:
        """Nothing: the context is the caller's."""


@asynccontextmanager
async def in_process(path: str, options: EngineOptions) -> AsyncGenerator[InProcessDriver, None]:
    """The engine at `path`, loaded for as long as it is measured. Raises as LoadedEngine does."""
    with LoadedEngine(path, options) as loaded:
        name = loaded.file.manifest["model"]["name"]
        yield InProcessDriver(ServerContext(ServedEngine.of(loaded), name, ServerSettings()))
