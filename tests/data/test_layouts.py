"""Column layouts: recognised by name, and each the same conversation as its `messages`."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.dataset.layouts import LAYOUTS, find_layout, prompt_of
from twinkle_core.errors import DataError

TEXT = st.text(max_size=8)
WORDS = st.text(min_size=1, max_size=8)


def example(row):
    return find_layout(list(row)).example(row)


def chat(*contents, system=None):
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * len(contents), contents, strict=False)]
    return [*([{"role": "system", "content": system}] if system else []), *turns]


@given(query=TEXT, response=TEXT, system=TEXT)
def test_every_layout_of_a_single_turn_is_the_same_conversation(query, response, system):
    expected = {"messages": chat(query, response, system=system)}
    context = {"system": system}
    rows = [
        {"messages": chat(query, response), **context},
        {"messages": chat(query, response, system=system)},
        {"conversations": [{"from": "human", "value": query}, {"from": "gpt", "value": response}], **context},
        {"conversations": [{"role": "user", "content": query}, {"role": "assistant", "content": response}], **context},
        {"conversation": [{"from": "user", "value": query}, {"from": "assistant", "value": response}], **context},
        {"query": query, "response": response, **context},
        {"instruction": query, "input": "", "output": response, **context},
        {"instruction": query, "input": None, "output": response, **context},
        {"prompt": query, "completion": response, **context},
        {"prompt": chat(query), "completion": chat(query, response)[1:], **context},
    ]
    for row in rows:
        before = copy.deepcopy(row)
        assert example(row) == expected
        assert row == before, "rows are not mutated"


@given(turns=st.lists(st.tuples(TEXT, TEXT), max_size=3), query=TEXT, response=TEXT)
def test_history_comes_before_the_last_turn(turns, query, response):
    expected = chat(*(text for turn in turns for text in turn), query, response)
    assert example({"query": query, "response": response, "history": [list(turn) for turn in turns]})["messages"] == expected
    as_messages = chat(*(text for turn in turns for text in turn))
    assert example({"query": query, "response": response, "history": as_messages})["messages"] == expected


@given(prompt=WORDS, good=TEXT, bad=TEXT, system=TEXT)
def test_every_spelling_of_a_preference_row_is_the_same_pair(prompt, good, bad, system):
    expected = {"chosen": {"messages": chat(prompt, good, system=system)},
                "rejected": {"messages": chat(prompt, bad, system=system)}}
    context = {"system": system}
    rows = [
        {"prompt": prompt, "chosen": good, "rejected": bad, **context},
        {"prompt": chat(prompt), "chosen": good, "rejected": bad, **context},
        {"prompt": prompt, "chosen": chat(prompt, good)[1:], "rejected": chat(prompt, bad)[1:], **context},
        {"prompt": prompt, "chosen": chat(prompt, good), "rejected": chat(prompt, bad), **context},
        {"chosen": chat(prompt, good), "rejected": chat(prompt, bad), **context},
        {"chosen": chat(prompt, good, system=system), "rejected": chat(prompt, bad, system=system), "prompt": prompt},
        {"prompt": prompt, "chosen": chat("", good)[1], "rejected": chat("", bad)[1], **context},
    ]
    for row in rows:
        assert example(row) == expected


def test_sharegpt_names_of_tools_become_roles_and_calls():
    row = {"conversations": [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "It is sunny."},
    ], "tools": '[{"type": "function", "function": {"name": "weather"}}]'}
    assert example(row) == {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]},
            {"role": "tool", "content": "sunny"},
            {"role": "assistant", "content": "It is sunny."},
        ],
        "tools": [{"type": "function", "function": {"name": "weather"}}],
    }


def test_null_keys_of_messages_do_not_reach_the_conversation():
    row = {"messages": [
        {"role": "user", "content": "Hi", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": None, "type": "function", "function": {"name": "f", "arguments": {"x": None}, "strict": None}}]},
    ]}
    assert example(row)["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": None}}}]},
    ]


@pytest.mark.parametrize("arguments", [
    ({"city": "Paris"}, {"unit": "C", "days": 3}), ('{"city": "Paris"}', {"unit": "C"}), ({}, [])])
def test_tool_arguments_of_different_shape_survive_storage(arguments):
    rows = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": one}}]}]} for one in arguments]
    dataset = Dataset(DatasetMeta(data=rows))
    assert dataset[:] == rows
    assert dataset.examples_at([0, 1]) == rows


def test_tool_arguments_survive_parquet(tmp_path):
    rows = [{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": one}}]}]}
            for one in ({"a": 1}, {"b": {"c": None}})]
    path = Dataset(DatasetMeta(data=rows)).save_as(str(tmp_path / "a.parquet"))
    assert Dataset(path)[:] == rows


def test_user_data_is_carried_under_every_layout():
    data = {"answer": 7, "nested": {"x": [None, 1.5]}}
    rows = {
        "chosen/rejected": {"prompt": "p", "chosen": "a", "rejected": "b"}, "messages": {"messages": chat("a", "b")},
        "conversations": {"conversations": chat("a", "b")}, "conversation": {"conversation": chat("a", "b")},
        "query/response": {"query": "a", "response": "b"}, "instruction/input/output": {"instruction": "a", "output": "b"},
        "prompt/completion": {"prompt": "a", "completion": "b"}, "text": {"text": "a"},
    }
    assert set(rows) == {layout.name for layout in LAYOUTS}
    for row in rows.values():
        assert example({**row, "user_data": data})["user_data"] == data


def test_the_prompt_is_the_conversation_without_the_last_assistant_message():
    assert prompt_of(example({"messages": chat("a", "b", "c", "d")}))["messages"] == chat("a", "b", "c")
    assert prompt_of(example({"messages": chat("a", "b", "c")}))["messages"] == chat("a", "b", "c")
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "user_data": {"x": 1}}
    assert prompt_of(example(pair)) == {"messages": chat("a"), "user_data": {"x": 1}}


def test_a_prompt_of_nothing_is_an_error():
    with pytest.raises(DataError, match="assistant message only, so there is no prompt"):
        prompt_of(example({"messages": [{"role": "assistant", "content": "b"}]}))
    with pytest.raises(DataError, match=r"plain text has no turns.*Use a layout with messages"):
        prompt_of(example({"text": "a"}))


def test_unknown_columns_are_an_error_that_lists_them_and_the_layouts():
    with pytest.raises(DataError, match=r"The columns `answer`, `question` are no layout that is known\. Known: chosen/rejected "
                       r"\(chosen, rejected\); messages \(messages\); .*text \(text\)\. Turn the rows into `messages` with "
                       r"`dataset\.map"):
        find_layout(["question", "answer"])


@pytest.mark.parametrize(("row", "message"), [
    ({"query": "a", "response": None}, "the column `response` is empty"),
    ({"query": 3, "response": "b"}, "the column `query` holds a int: '3'. It must be text"),
    ({"messages": "hello"}, "the column `messages` holds a str, not a list of messages"),
    ({"messages": []}, "the column `messages` holds no message.* remove the row"),
    ({"messages": ["hello"]}, r"`messages\[0\]` is a str, not a message: 'hello'"),
    ({"messages": [{"content": "a"}]}, r"`messages\[0\]` has no `role` \(`content` are there\)"),
    ({"messages": [{"role": "user"}]}, r"`messages\[0\]` has no `content`"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": "f()"}]}, "has `tool_calls` of type str. Use a list"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": ["f()"]}]}, "has a tool call of type str"),
    ({"conversations": [{"from": "alien", "value": "a"}]}, r"`conversations\[0\]` is from 'alien'\. Known: `assistant`"),
    ({"conversations": [{"from": "human"}]}, "has no `value`. Give it the text of the turn"),
    ({"conversations": [{"from": "function_call", "value": "f("}]}, "holds text that is not JSON"),
    ({"messages": chat("a"), "tools": 3}, "the column `tools` holds a int. Use a list"),
    ({"messages": chat("a"), "user_data": 3}, r"`user_data` is a int\. Use a dict"),
    ({"query": "a", "response": "b", "history": ["c"]}, r"`history\[0\]` is 'c'\. Use \[query, response\] pairs"),
    ({"query": "a", "response": "b", "history": 3}, "the column `history` holds a int"),
    ({"chosen": "a", "rejected": "b"}, "holds an answer without a prompt. Add a column `prompt`"),
    ({"chosen": chat("a"), "rejected": chat("a", "b")}, "the column `chosen` ends with a message of `user`"),
])
def test_a_row_of_the_wrong_shape_is_an_error_that_names_the_column(row, message):
    with pytest.raises(DataError, match=message):
        example(row)


def test_messages_may_be_json_text():
    assert example({"messages": json.dumps(chat("a", "b"))})["messages"] == chat("a", "b")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["", "a", "[", "[]", "{}", "user", "human"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "from", "value", "tool_calls", "function", "x"]), inner, max_size=3), max_leaves=8)


@settings(max_examples=200)
@given(data=st.data(), layout=st.sampled_from(LAYOUTS))
def test_whatever_a_row_holds_it_is_an_example_or_a_data_error(data, layout):
    row = {column: data.draw(VALUES, label=column) for column in layout.columns}
    for is_prompt in (False, True):
        try:
            found = layout.example(row)
            if is_prompt:
                prompt_of(found)
        except DataError:
            pass
        else:
            assert found
