"""Which format a model writes calls in: told by what its chat template shows it, or by name."""

from __future__ import annotations

from ...errors import RequestError
from .form import Form
from .hermes import BEGIN as TOOL_CALL
from .hermes import Hermes
from .llama import MARKER as PYTHON_TAG
from .llama import Llama
from .mistral import ARGS, Mistral
from .mistral import MARKER as TOOL_CALLS
from .pythonic import Pythonic
from .qwen_coder import FUNCTION, PARAMETER, QwenCoder

NAMES = ("hermes", "llama3_json", "mistral", "qwen3_coder", "pythonic")
# From the wording that Llama's templates show the format in; those of 3.2 do not name the marker.
_LLAMA_WORDING = '"parameters": dictionary of argument name'
_PYTHONIC_WORDING = "[func_name1(params_name1="
# Of GLM 4.5, which writes something else between the same markers.
_OTHER_KEYS = "<arg_key>"


class UnknownFormat(RequestError):
    """How the model writes calls is not known."""


def choose(template: str, name: str | None) -> Form:
    """template: the chat template's source. Raises UnknownFormat."""
    name = name or _told_by(template)
    if name is None:
        raise UnknownFormat("its chat template shows none of the formats that are known here")
    forms: dict[str, Form] = {"hermes": Hermes(), "llama3_json": Llama(), "mistral": Mistral(ARGS in template),
                              "qwen3_coder": QwenCoder(), "pythonic": Pythonic()}
    return forms[name]


def _told_by(template: str) -> str | None:
    if FUNCTION in template and PARAMETER in template:
        return "qwen3_coder"
    if TOOL_CALL in template:
        return None if _OTHER_KEYS in template else "hermes"
    if TOOL_CALLS in template:
        return "mistral"
    if _PYTHONIC_WORDING in template:
        return "pythonic"
    if PYTHON_TAG in template or _LLAMA_WORDING in template:
        return "llama3_json"
    return None
