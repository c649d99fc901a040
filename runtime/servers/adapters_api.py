"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them (docs/lora.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from ..adapters.errors import AdapterExists, AdapterLoadingOff, UnknownAdapter
from ..adapters.source import AdapterSource, check_sha256
from ..errors import IngotError
from ..executor.request import Draining
from . import openai_fields as fields
from .openai_errors import ApiError, invalid
from .openai_request import known_fields
from .openai_response import to_json

if TYPE_CHECKING:
    from ..adapters.loaded import LoadedAdapter
    from .context import ServerContext

_LOAD: dict[str, fields.Check] = {"lora_name": fields.text, "lora_path": fields.text, "sha256": fields.text}
_UNLOAD: dict[str, fields.Check] = {"lora_name": fields.text}


class AdaptersApi:
    """The handlers. Every error leaves them as ApiError."""

    def __init__(self, context: ServerContext) -> None:
        self._adapters = context.adapters

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/load_lora_adapter", self.load), web.post("/v1/unload_lora_adapter", self.unload)]

    async def load(self, request: web.Request) -> web.Response:
        body = _body(await request.read(), _LOAD, ("lora_name", "lora_path"))
        try:
            if "sha256" in body:
                check_sha256(body["sha256"], "sha256")
            loaded = await self._adapters.load(body["lora_name"], AdapterSource(body["lora_path"], body.get("sha256")))
        except IngotError as error:
            raise _api_error(error) from None
        return _response({"status": "loaded", **adapter_facts(loaded)})

    async def unload(self, request: web.Request) -> web.Response:
        body = _body(await request.read(), _UNLOAD, ("lora_name",))
        try:
            unloaded = await self._adapters.unload(body["lora_name"])
        except IngotError as error:
            raise _api_error(error) from None
        return _response({"status": "unloaded", **adapter_facts(unloaded)})


def adapter_facts(loaded: LoadedAdapter) -> dict[str, Any]:
    adapter = loaded.adapter
    return {"lora_name": loaded.name, "sha256": adapter.sha256, "rank": adapter.rank,
            "num_modules": len(adapter.modules)}


def _body(data: bytes, known: dict[str, fields.Check], required: tuple[str, ...]) -> dict[str, Any]:
    body = known_fields(fields.parse_body(data), known)
    for name in required:
        if name not in body:
            raise invalid(name, f"{name}: missing", "missing_field")
    return body


def _response(value: Any) -> web.Response:
    return web.Response(text=to_json(value), content_type="application/json")


def _api_error(error: IngotError) -> ApiError:
    match error:
        case AdapterLoadingOff():
            return ApiError(403, str(error), code="adapter_loading_off")
        case UnknownAdapter():
            return ApiError(404, str(error), "lora_name", "adapter_not_found")
        case AdapterExists():
            return ApiError(409, str(error), "lora_name", "adapter_exists")
        case Draining():
            return ApiError(503, str(error), code="draining")
        case _:
            return ApiError(400, str(error), None, "invalid_adapter")
