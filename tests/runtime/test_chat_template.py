"""Chat templates, in the dialect of Hugging Face checkpoints."""

import datetime

import pytest

from ingot.runtime.chat_template import ChatTemplate, ChatTemplateError

MESSAGES = [{"role": "system", "content": "Be <brief> & kind."}, {"role": "user", "content": "Grüße"}]


@pytest.mark.parametrize(("source", "expected"), [
    # Blocks leave neither the blank before nor the line break behind.
    ("{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}", "system\nuser\n"),
    ("{{ messages[1]['content'] | tojson }}", '"Grüße"'),
    ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "system",\n "content": "Be <brief> & kind."\n}'),
    ("{{ messages[0].content }}", "Be <brief> & kind."),
    ("{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ custom }}", "<s>TrueTrue7"),
    ("{% if add_generation_prompt %}A{% endif %}", "A"),
    ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}", "user"),
    ("{% set n = 1 %}{% generation %}{% set n = 2 %}x{{ n }}{% endgeneration %}{{ n }}", "x21"),
    ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
    ("{{ undefined_name }}|{{ messages | length }}", "|2"),
])  # fmt: skip
def test_dialect(source: str, expected: str) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, custom=7) == expected


@pytest.mark.parametrize(("source", "asks"), [
    ("{% for t in tools %}{{ t }}{% endfor %}", True),
    ("{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}"
     "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", True),
    ("{%- if tools %}x{% endif %}{% generation %}{% endgeneration %}", True),
    ("{{ messages[0].tools }}{{ 'tools' }}", False),
    ("{% set tools = [] %}{{ tools }}", False),
])  # fmt: skip
def test_variables_that_a_template_asks_for(source: str, asks: bool) -> None:
    assert ("tools" in ChatTemplate(source).names) == asks


def test_today() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]) == str(datetime.datetime.now().year)


def test_without_the_beginning_of_an_answer() -> None:
    template = ChatTemplate("{% if add_generation_prompt %}A{% else %}B{% endif %}")
    assert template.render(MESSAGES, add_generation_prompt=False) == "B"


@pytest.mark.parametrize(("source", "message"), [
    ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
    ("{{ messages[9].content }}", "refuses these messages"),
    ("{{ 1 + messages[0].content }}", "refuses these messages"),
    ("{{ 1 / 0 }}", "refuses these messages"),
])  # fmt: skip
def test_refusals(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert caught.value.exit_status == 2


def test_a_malformed_template_names_the_line() -> None:
    with pytest.raises(ChatTemplateError, match="line 2: "):
        ChatTemplate("a\n{% if %}")


@pytest.mark.parametrize("messages", [["text"], [{"content": "no role"}]])
def test_messages_that_are_none(messages: list[object]) -> None:
    with pytest.raises(ChatTemplateError, match=r"message 0 is .*role and content"):
        ChatTemplate("").render(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
])  # fmt: skip
def test_templates_are_kept_in_a_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render(MESSAGES)
