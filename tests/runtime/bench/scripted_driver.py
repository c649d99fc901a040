"""A driver whose server answers as a test says."""

import asyncio
from collections.abc import AsyncGenerator

from ingot.runtime.bench.drivers.driver import Delivery, Facts


class ScriptedDriver:
    """token_s: time of each token. prompts: of the requests so far, in order. page: its metrics."""

    def __init__(self, token_s: float = 0.0, page: str | None = None, facts: Facts | None = None) -> None:
        self.token_s = token_s
        self.page = page
        self.prompts: list[list[int] | str] = []
        self.request_ids: list[str] = []
        self.under_way = self.most_under_way = 0
        self._facts = facts or Facts("here", "scripted", vocab_size=1000, max_seq_len=10_000)

    async def facts(self) -> Facts:
        return self._facts

    async def generate(self, request_id: str, prompt: list[int] | str,
                       output_tokens: int) -> AsyncGenerator[Delivery, None]:
        self.prompts.append(prompt)
        self.request_ids.append(request_id)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            self.check(prompt)
            for token in range(output_tokens):
                await asyncio.sleep(self.token_s)
                yield Delivery(1, [token], len(prompt), min(3, len(prompt) - 1))
        finally:
            self.under_way -= 1

    def check(self, prompt: list[int] | str) -> None:
        """Raises what the request is to end with."""

    async def metrics(self) -> str | None:
        return self.page

    async def close(self) -> None:
        pass
