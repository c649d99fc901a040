"""An engine in this process: no server, no protocol, the same executor."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

from ...errors import IngotError
from ...executor.async_engine import AsyncEngine
from ...executor.loading import EngineOptions, LoadedEngine
from ...executor.request import Draining, EngineFailed, QueueFull, Request
from ...sampling import SamplingParams
from ...servers.context import ServerContext, ServerSettings
from ...servers.metrics_text import render
from .driver import CallFailed, Delivery, Facts, Refused


class InProcessDriver:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def facts(self) -> Facts:
        context = self._context
        manifest = context.file.manifest
        settings = {"target": manifest["target"]["name"], "precision": manifest["precision"],
                    **dict(context.settings.scheduling)}
        return Facts("in process", context.model_name, context.file.hash, context.vocab_size,
                     context.limits.max_seq_len, context.engine.stats().block_size, settings)

    async def generate(self, request_id: str, prompt: list[int] | str,
                       output_tokens: int) -> AsyncGenerator[Delivery, None]:
        if isinstance(prompt, str):
            if self._context.tokenizer is None:
                raise CallFailed("the engine has no tokenizer: the data set must hold input_ids")
            prompt = await asyncio.to_thread(self._context.tokenizer.encode, prompt)
        try:
            stream = self._context.engine.generate(
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
        context = ServerContext(AsyncEngine(loaded.executor), loaded.file, loaded.tokenizer, loaded.limits,
                                loaded.vocab_size, loaded.stop_token_ids, loaded.file.manifest["model"]["name"],
                                ServerSettings(scheduling=tuple(loaded.facts().items())))
        yield InProcessDriver(context)
