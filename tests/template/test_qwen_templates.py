"""The Qwen templates keep the contract of all templates, and read their families' tool calls."""

import functools
from typing import Any, ClassVar

import pytest

from twinkle_core import registry
from twinkle_core.template.template import Template
from twinkle_core.testing.templates import CONVERSATIONS, TemplateContract, supervised_runs
from twinkle_qwen.templates import Qwen2_5Template, Qwen3_5Template, Qwen3Template

CHAT = {"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am a model."}]}


@functools.cache
def made(template_class: type[Template], model_id: str, **options: Any) -> Template:
    return template_class(model_id, **options)


class TestQwen35(TemplateContract):
    @pytest.fixture
    def template(self):
        return made(Qwen3_5Template, "tiny://qwen3_5")


class TestQwen35Thinking(TemplateContract):
    @pytest.fixture
    def template(self):
        return made(Qwen3_5Template, "tiny://qwen3_5", enable_thinking=True)


class TestQwen3(TemplateContract):
    @pytest.fixture
    def template(self):
        return made(Qwen3Template, "tiny://qwen3")


class TestQwen3WithoutThinking(TemplateContract):
    @pytest.fixture
    def template(self):
        return made(Qwen3Template, "tiny://qwen3", enable_thinking=False)


class TestQwen25WithItsOwnTemplate(TemplateContract):
    conversations: ClassVar = {name: chat for name, chat in CONVERSATIONS.items() if name != "reasoning"}

    @pytest.fixture
    def template(self, assets):
        return made(Qwen2_5Template, "tiny://qwen3", chat_template=assets / "templates" / "qwen2_5.jinja")


@pytest.mark.parametrize("name", ["Qwen3_5Template", "Qwen3Template", "Qwen2_5Template"])
def test_the_templates_are_found_by_name(name):
    assert issubclass(registry.resolve("templates", name), Template)


def test_the_stand_in_model_whose_template_knows_content_only_is_labelled(ms_cache):
    template = Qwen3_5Template(model_id="ms://Qwen/Qwen3.5-4B")
    feature = template.encode(CHAT)
    assert feature["input_ids"] == template.tokenizer.apply_chat_template(CHAT["messages"], return_dict=False)
    assert [template.decode(run) for run in supervised_runs(feature)] == ["I am a model.<|im_end|>"]


@pytest.mark.parametrize(("enable_thinking", "ending"), [(True, "<think>\n"), (False, "<think>\n\n</think>\n\n")])
def test_the_thinking_switch_changes_the_prompt(enable_thinking, ending):
    template = made(Qwen3_5Template, "tiny://qwen3_5", enable_thinking=enable_thinking)
    prompt = template.encode(CHAT, add_generation_prompt=True)
    assert template.decode(prompt["input_ids"]).endswith("<|im_start|>assistant\n" + ending)


@pytest.mark.parametrize("enable_thinking", [None, True, False])
@pytest.mark.parametrize(("template_class", "model_id"), [(Qwen3_5Template, "tiny://qwen3_5"), (Qwen3Template, "tiny://qwen3")])
def test_an_empty_think_block_is_never_supervised(template_class, model_id, enable_thinking):
    template = made(template_class, model_id, enable_thinking=enable_thinking)
    feature = template.encode(CHAT)
    assert "</think>" in template.decode(feature["input_ids"])
    assert [template.decode(run) for run in supervised_runs(feature)] == ["I am a model.<|im_end|>"]


def test_history_reasoning_is_stripped_as_the_template_does_it():
    template = made(Qwen3_5Template, "tiny://qwen3_5")
    reasoned = CONVERSATIONS["reasoning"]["messages"]
    text = template.decode(template.encode({"messages": [*reasoned, *reasoned]})["input_ids"])
    assert text.count("Two and three") == 1
    assert not template.is_prefix_stable


QWEN35_CALL = ("Let me see.\n\n<tool_call>\n<function=f>\n<parameter=word>\ntwo\nlines\n</parameter>\n"
               "<parameter=count>\n3\n</parameter>\n"
               "<parameter=flag>\nTrue\n</parameter>\n<parameter=list>\n[1, \"a\"]\n</parameter>\n</function>\n</tool_call>")


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_qwen35_calls_are_read_from_tags():
    text, calls = made(Qwen3_5Template, "tiny://qwen3_5").parse_tool_calls(QWEN35_CALL)
    assert text == "Let me see."
    assert calls == [call("f", {"word": "two\nlines", "count": 3, "flag": True, "list": [1, "a"]})]


def test_qwen35_schemas_tell_the_types_of_arguments():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"count": {"type": "string"}}}}}]
    _, calls = made(Qwen3_5Template, "tiny://qwen3_5").parse_tool_calls(QWEN35_CALL, tools=tools)
    assert calls[0]["function"]["arguments"]["count"] == "3"


def test_two_calls_are_two_calls():
    tags = "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"
    assert made(Qwen3_5Template, "tiny://qwen3_5").parse_tool_calls(tags) == ("", [call("f", {}), call("g", {})])
    json = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g"}\n</tool_call>'
    assert made(Qwen3Template, "tiny://qwen3").parse_tool_calls(json) == ("", [call("f", {}), call("g", {})])


@pytest.mark.parametrize("text", [
    "<tool_call>\n<function=f>\nstray\n</function>\n</tool_call>", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>",
    '<tool_call>\n{"name": "f"}\n</tool_call>'])
def test_a_qwen35_call_that_is_not_well_formed_stays_text(text):
    assert made(Qwen3_5Template, "tiny://qwen3_5").parse_tool_calls(text) == (text, [])
