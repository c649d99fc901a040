"""Thoughts through the HTTP server: told apart from content and calls, and let through by guides."""

from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.guides import Guides
from ingot.runtime.sampling import Guide
from tests.runtime.mock_engine import EOS, VOCAB_SIZE
from tests.runtime.servers.scripted_engine import ScriptedRunner, outputs
from tests.runtime.servers.test_tool_calls import (
    HERMES,
    NOW,
    PARIS,
    TOOLS,
    chat,
    joined,
    serving,
    special_tokenizer,
    streamed,
    told,
)


@pytest.mark.parametrize(("ending", "begin"), [("<think>\n", ""), ("", "<think>\n")])
@pytest.mark.parametrize("tools", [TOOLS, []])
def test_thoughts_are_told_apart(tmp_path: Path, runner: ScriptedRunner, ending: str, begin: str, tools: Any) -> None:
    """Calls within them are none; without the option they are content."""
    text = f"{begin}Is <tool_call> right?\n</think>\n\nI look.{PARIS if tools else ''}"
    runner.script = lambda request: outputs(request, text)
    with serving(tmp_path, runner, special_tokenizer(HERMES + ending), reasoning="think") as address:
        choice = chat(address, tools)[1]["choices"][0]
        assert choice["message"]["reasoning_content"] == "Is <tool_call> right?"
        assert told(choice) == ("I look.", [("weather", '{"city": "Paris 😀"}')] if tools else [],
                                "tool_calls" if tools else "stop")
        chunks = streamed(address, tools=tools)
        assert joined(chunks) == told(choice)
        thoughts = [chunk["choices"][0]["delta"].get("reasoning_content") or "" for chunk in chunks]
        assert "".join(thoughts) == "Is <tool_call> right?" and sum(map(bool, thoughts)) > 5
        runner.script = lambda request: outputs(request, "Plain.")
        assert "reasoning_content" not in chat(address, tools)[1]["choices"][0]["message"] or not begin
    runner.script = lambda request: outputs(request, text)
    with serving(tmp_path, runner, special_tokenizer(HERMES + ending)) as address:
        message = chat(address, tools)[1]["choices"][0]["message"]
        assert "reasoning_content" not in message and message["content"].startswith(begin + "Is <tool_call> right?")


@pytest.mark.parametrize(("ending", "think_first", "call_first"), [
    ("<think>\n", True, False), ("<think>\n\n</think>\n\n", False, True), ("", True, True)])
def test_thoughts_may_come_before_a_forced_call(tmp_path: Path, runner: ScriptedRunner, ending: str, think_first: bool,
                                                call_first: bool) -> None:
    pytest.importorskip("llguidance")
    from tests.runtime.servers.tool_calls.test_grammars import TOKENIZER, accepts

    template = HERMES + "{# <think> #}" + ending
    with serving(tmp_path, runner, special_tokenizer(template)) as address:
        assert chat(address, tools=[NOW], tool_choice="required")[0] == 200
    guide, call = runner.requests[0].params.guide, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert isinstance(guide, Guide)
    guides = Guides(TOKENIZER, VOCAB_SIZE, [EOS])
    thoughts = ("" if ending else "<think>") + "Well.\n</think>\n\n"
    assert accepts(guides.start(guide), thoughts + call) == think_first
    assert accepts(guides.start(guide), call) == call_first


@pytest.mark.parametrize(("ending", "think_first", "json_first"), [
    ("<think>\n", True, False), ("<think>\n\n</think>\n\n", False, True), ("", True, True)])
def test_a_form_binds_what_comes_behind_thoughts(tmp_path: Path, runner: ScriptedRunner, ending: str, think_first: bool,
                                                 json_first: bool) -> None:
    pytest.importorskip("llguidance")
    from tests.runtime.servers.tool_calls.test_grammars import TOKENIZER, accepts

    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "items": {"type": "null"}}}}
    thoughts = ("" if ending else "<think>") + "Well.\n</think>\n\n"
    with serving(tmp_path, runner, special_tokenizer(HERMES + "{# <think> #}" + ending), reasoning="think") as address:
        assert chat(address, [], response_format=form)[0] == 200
        guide, guides = runner.requests[0].params.guide, Guides(TOKENIZER, VOCAB_SIZE, [EOS])
        assert isinstance(guide, Guide)
        assert accepts(guides.start(guide), thoughts + "[null, null]") == think_first
        assert accepts(guides.start(guide), "[null]") == json_first
        # A form that is no JSON comes at once, and is content.
        runner.script = lambda request: outputs(request, "yes")
        choice = chat(address, [], structured_outputs={"choice": ["yes", "no"]})[1]["choices"][0]
        assert choice["message"]["content"] == "yes" and "reasoning_content" not in choice["message"]
