"""The format is told by the chat template; templates as checkpoints have them, cut to what shows the format."""

import pytest

from ingot.runtime.servers.tool_calls import NAMES, UnknownFormat, choose
from ingot.runtime.servers.tool_calls.mistral import Mistral


@pytest.mark.parametrize(("template", "name"), [
    ("within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\"name\": <function-name>, \"arguments\": ", "hermes"),
    ("<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1", "qwen3_coder"),
    ("{{- '[TOOL_CALLS][' }}", "mistral"),
    ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral"),
    ("'Respond in the format {\"name\": function name, \"parameters\": dictionary of argument name and its value}.'",
     "llama3_json"),
    ("{{- \"<|python_tag|>\" + tool_call.name }}", "llama3_json"),
    ("in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
     "pythonic"),
])
def test_templates(template: str, name: str) -> None:
    assert choose(template, None).name == name
    assert choose("{{ tools }}", name).name == name


@pytest.mark.parametrize("template", [
    "{{ tools }}", "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>",
    "<|channel|>commentary to=functions.f"])
def test_other_formats(template: str) -> None:
    with pytest.raises(UnknownFormat):
        choose(template, None)
    assert [choose(template, name).name for name in NAMES] == list(NAMES)


def test_ids() -> None:
    assert all(len(id_) == 9 and id_.isalnum() for id_ in (Mistral(True).new_id() for _ in range(20)))
    assert len({choose("", "hermes").new_id() for _ in range(20)}) == 20
