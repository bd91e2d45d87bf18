"""The public class: errors that say row, turn and remedy; truncation; plain text; parsing; joining completions to prompts."""

import copy
import pickle
import subprocess
import sys

import pytest

from twinkle_core.data_format import IGNORE_INDEX
from twinkle_core.errors import ArgumentError, DataError, TemplateError
from twinkle_core.template.template import Template
from twinkle_core.testing.templates import supervised_runs

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
QUESTION = {"role": "user", "content": "Who are you?"}
ANSWER = {"role": "assistant", "content": "I am a model."}
CHAT = {"messages": [QUESTION, ANSWER]}


@pytest.fixture
def make(tiny_tokenizer):
    """Make a template of plain ChatML; keywords go to its constructor."""
    def made(chat_template=CHATML, **options):
        return Template("small", chat_template=chat_template, tokenizer=tiny_tokenizer, **options)
    return made


def test_importing_the_class_loads_no_heavy_library():
    code = ("import sys; from twinkle_core.template.template import Template; "
            "print([name for name in ('torch', 'transformers', 'datasets', 'jinja2') if name in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_no_torch_is_needed():
    code = ("import sys; sys.modules['torch'] = None; from twinkle_core.template.template import Template; "
            "template = Template('tiny://qwen3'); "
            "print(len(template.encode({'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]})))")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "2", run.stderr


def test_labels_by_hand(make):
    template = make()
    feature = template.encode(CHAT)
    prompt = template.tokenizer.encode("<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n")
    answer = template.tokenizer.encode("I am a model.<|im_end|>")
    newline = template.tokenizer.encode("\n")
    assert feature == {
        "input_ids": prompt + answer + newline,
        "labels": [IGNORE_INDEX] * len(prompt) + answer + [IGNORE_INDEX] * len(newline),
    }


def test_default_system_is_for_conversations_that_have_none(make):
    template = make(default_system="Be short.")
    assert template.decode(template.encode(CHAT)["input_ids"]).startswith("<|im_start|>system\nBe short.<|im_end|>")
    own = {"messages": [{"role": "system", "content": "Be long."}, QUESTION, ANSWER]}
    assert "Be short" not in template.decode(template.encode(own)["input_ids"])


def test_a_list_of_text_parts_is_their_text(make):
    parts = [{"type": "text", "text": "Who are ", "image": None}, {"type": "text", "text": "you?"}]
    template = make()
    assert template.encode({"messages": [{"role": "user", "content": parts}, ANSWER]}) == template.encode(CHAT)


def test_a_prompt_leaves_the_last_answer_out(make):
    template = make()
    prompt = template.encode(CHAT, add_generation_prompt=True)
    assert prompt == template.encode({"messages": [QUESTION]}, add_generation_prompt=True)
    assert template.decode(prompt["input_ids"]).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(("row", "error"), [
    ({"messages": []}, "`messages` is .* non-empty list"),
    ({"messages": "Hi"}, "`messages` is 'Hi' of type str"),
    ({"message": [QUESTION]}, "unknown key `message`. Did you mean `messages`?"),
    ({"messages": [QUESTION, ANSWER], "id": 3}, "unknown key `id`.*`user_data`"),
    ({"tools": []}, "no `messages`"),
    ("Hi", "the conversation is a str"),
    ({"messages": ["Hi"]}, "turn 0: the message is 'Hi' of type str"),
    ({"messages": [{"content": "Hi"}]}, "turn 0: the message's `role` is None"),
    ({"messages": [{"role": "user", "content": 5}, ANSWER]}, "turn 0: the message's `content` is 5 of type int.*text"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, ANSWER]}, "Only parts of text"),
    ({"messages": [QUESTION, {"role": "assistant", "tool_calls": "f()"}]}, "turn 1: `tool_calls` is 'f\\(\\)' of type str.*list"),
    ({"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "turn 1: `tool_calls` holds"),
    ({"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}]},
     "turn 1: the `arguments` of the call of `f` are '{x' .*not JSON"),
    ({"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
     "turn 1: the `arguments` of the call of `f` are \\[1\\]"),
    ({"messages": [QUESTION, ANSWER], "tools": "[{"}, "`tools` is .*not JSON"),
    ({"messages": [QUESTION, ANSWER], "tools": ["f"]}, "`tools` is .*list of dicts"),
    ({"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]},
     "turn 1: .*prints nothing of the assistant message's `tool_calls`. Leave it out of the row, or pass a `chat_template`"),
    ({"messages": [QUESTION]}, "`Template` of `small` marks no token as supervised"),
    ({"messages": [QUESTION, {"role": "assistant", "content": "", "reasoning_content": None}, QUESTION]}, None),
])
def test_a_bad_row_is_an_error_that_says_where_and_what(make, row, error):
    template = make()
    if error is None:  # an answer may be empty: then its end is what is learned
        assert [template.decode(run) for run in supervised_runs(template.encode(row))] == ["<|im_end|>"]
        return
    with pytest.raises(TemplateError, match=error):
        template.encode(row)
    with pytest.raises(TemplateError, match="In row 1") as caught:
        template.batch_encode([CHAT, row])
    assert caught.value.row == 1


def test_a_conversation_that_the_template_refuses_names_its_row(make):
    template = make("{% for m in messages %}{% if m.role == 'user' and m.content == 'No' %}{{ raise_exception('I will not') }}"
                    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(TemplateError, match="In row 2: .*refuses the conversation \\(user, assistant\\): I will not"):
        template.batch_encode([CHAT, CHAT, {"messages": [{"role": "user", "content": "No"}, ANSWER]}])


def test_a_template_that_changes_texts_is_an_error_that_names_the_turn(make):
    template = make(CHATML.replace("m.content", "m.content | replace('you', 'me')"))
    with pytest.raises(TemplateError, match="In row 0, turn 0: .*does not print this conversation's texts as they are"):
        template.batch_encode([CHAT])


def test_generation_blocks_narrow_what_is_supervised(make):
    blocks = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
              "{% endgeneration %}<|im_end|>\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}")
    template = make(blocks)
    assert [template.decode(run) for run in supervised_runs(template.encode(CHAT))] == ["I am a model."]


def test_a_generation_block_does_not_widen_what_is_supervised(make):
    blocks = CHATML.replace("<|im_start|>{{ m.role }}", "{% generation %}<|im_start|>{{ m.role }}").replace(
        "{% endfor %}", "{% endgeneration %}{% endfor %}")
    assert make(blocks).encode(CHAT) == make().encode(CHAT)


def test_the_date_may_change_while_a_template_is_in_use(make):
    template = make("{{ clock.today }}\n" + CHATML, variables={"clock": (clock := {"today": "Monday"})})
    template.encode(CHAT)
    clock["today"] = "Tuesday"
    feature = template.encode(CHAT)
    assert template.decode(feature["input_ids"]).startswith("Tuesday\n")
    assert [template.decode(run) for run in supervised_runs(feature)] == ["I am a model.<|im_end|>"]


def test_a_turn_whose_place_cannot_be_told_is_an_error(make):
    template = make("{% for m in messages | reverse %}{{ m.content }}|{% endfor %}")
    error = "row 0, turn 1: it cannot be told where the assistant's turn begins.*generation.*`small`"
    with pytest.raises(TemplateError, match=error):
        template.batch_encode([CHAT])


def test_a_generation_block_that_cuts_a_text_is_an_error(make):
    template = make(CHATML.replace("{{ m.content }}", "{{ m.content[:3] }}{% generation %}{{ m.content[3:] }}{% endgeneration %}"))
    with pytest.raises(TemplateError, match="begins or ends inside a message's text.*whose blocks hold whole texts"):
        template.encode(CHAT)


def test_a_tokenizer_that_cannot_be_loaded_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(TemplateError, match=f"in {tmp_path} cannot be loaded.*Fetch the model again"):
        Template(str(tmp_path))


LONG = {"messages": [QUESTION, {"role": "assistant", "content": "one two three four five six seven eight nine ten"}]}


@pytest.mark.parametrize("is_batch", [False, True])
class TestTruncation:
    def encode(self, template, chat, is_batch):
        """Return the features of `chat`, encoded alone or as the second of a batch."""
        return template.batch_encode([chat, chat] if is_batch else [chat])[-1]

    def test_raise_says_both_lengths_and_what_to_do(self, make, is_batch):
        whole = len(make().encode(LONG)["input_ids"])
        template = make(max_length=whole - 1)
        advice = f"{whole} tokens, `max_length` is {whole - 1}.*Raise `max_length` to {whole}.*`split`"
        with pytest.raises(TemplateError, match=advice):
            self.encode(template, LONG, is_batch)

    def test_left_keeps_the_end(self, make, is_batch):
        whole = make().encode(LONG)
        limit = len(whole["input_ids"]) - 3
        kept = self.encode(make(max_length=limit, truncation_strategy="left"), LONG, is_batch)
        assert kept == [{"input_ids": whole["input_ids"][3:], "labels": whole["labels"][3:]}]

    def test_right_keeps_the_beginning(self, make, is_batch):
        whole = make().encode(LONG)
        limit = len(whole["input_ids"]) - 3
        kept = self.encode(make(max_length=limit, truncation_strategy="right"), LONG, is_batch)
        assert kept == [{"input_ids": whole["input_ids"][:limit], "labels": whole["labels"][:limit]}]

    def test_right_drops_a_row_of_which_only_the_prompt_is_left(self, make, is_batch):
        limit = len(make().encode({"messages": [QUESTION]}, add_generation_prompt=True)["input_ids"])
        assert self.encode(make(max_length=limit, truncation_strategy="right"), LONG, is_batch) == []

    def test_split_makes_pieces_that_give_the_whole_again(self, make, is_batch):
        whole = make().encode(LONG)
        limit = len(whole["input_ids"]) - 4
        assert self.encode(make(max_length=limit, truncation_strategy="split"), LONG, is_batch) == [
            {key: values[:limit] for key, values in whole.items()}, {key: values[limit:] for key, values in whole.items()}]

    def test_split_leaves_pieces_without_labels_out(self, make, is_batch):
        whole = make().encode(LONG)
        prompt = len(make().encode({"messages": [QUESTION]}, add_generation_prompt=True)["input_ids"])
        first = self.encode(make(max_length=prompt, truncation_strategy="split"), LONG, is_batch)[0]
        assert first["input_ids"] == whole["input_ids"][prompt:2 * prompt]

    def test_delete_leaves_nothing(self, make, is_batch):
        limit = len(make().encode(CHAT)["input_ids"])
        assert self.encode(make(max_length=limit, truncation_strategy="delete"), LONG, is_batch) == []
        assert self.encode(make(max_length=limit, truncation_strategy="delete"), CHAT, is_batch) == [make().encode(CHAT)]


def test_encode_of_one_row_says_that_truncation_left_nothing(make):
    with pytest.raises(TemplateError, match="leaves nothing that can be learned. Use `batch_encode`"):
        make(max_length=2, truncation_strategy="delete").encode(CHAT)


def test_a_prompt_is_not_split(make):
    with pytest.raises(TemplateError, match="prompt has .* tokens.*`left`, `right` or `delete`"):
        make(max_length=2, truncation_strategy="split").encode(CHAT, add_generation_prompt=True)
    kept = make(max_length=2, truncation_strategy="left").encode(CHAT, add_generation_prompt=True)
    assert kept == {"input_ids": make().encode(CHAT, add_generation_prompt=True)["input_ids"][-2:]}


@pytest.mark.parametrize(("options", "error"), [
    ({"truncation_strategy": "rigth"}, "`truncation_strategy='rigth'`: use one of .*Did you mean `right`"),
    ({"max_length": 0}, "`max_length=0`: use an integer >= 1"),
    ({"max_length": True}, "`max_length=True`"),
    ({"enable_thinking": "yes"}, "`enable_thinking='yes'`: use True, False, or None"),
    ({"chat_template": "no_such.jinja"}, "neither a jinja template .* nor a file.*Pass the text of a template, or the path"),
])
def test_a_wrong_option_is_an_error(make, options, error):
    with pytest.raises(ArgumentError, match=error):
        make(**options)


def test_a_switch_that_the_template_has_not_is_said(make):
    with pytest.warns(UserWarning, match="no switch `enable_thinking`; False changes nothing"):
        make(enable_thinking=False)


def test_a_chat_template_may_be_a_file(make, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(CHATML, encoding="utf-8")
    assert make(path).encode(CHAT) == make(str(path)).encode(CHAT) == make().encode(CHAT)


def test_a_tokenizer_without_chat_template_is_an_error(tiny_tokenizer):
    bare = copy.deepcopy(tiny_tokenizer)
    bare.chat_template = None
    with pytest.raises(TemplateError, match="has no chat template. Pass `chat_template=`"):
        Template("small", tokenizer=bare)


def test_plain_text_is_supervised_as_a_whole_and_ends_with_the_end_token(make):
    template = make()
    ids = [*template.tokenizer.encode("Once upon a time."), template.tokenizer.eos_token_id]
    assert template.encode_text("Once upon a time.") == {"input_ids": ids, "labels": ids}
    assert template.batch_encode_text(["Once upon a time."]) == [[{"input_ids": ids, "labels": ids}]]


def test_empty_text_is_an_error_that_names_the_row(make):
    with pytest.raises(TemplateError, match="In row 1: `text` is '' of type str"):
        make().batch_encode_text(["a", ""])


def test_parse_takes_reasoning_calls_and_answer_apart(make):
    template = make()
    text = '<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{"name": "f", "arguments": {"x": [1, null]}}\n</tool_call><|im_end|>'
    assert template.parse(template.tokenizer.encode(text)) == {
        "role": "assistant", "content": "Let me see.", "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": [1, None]}}}]}


@pytest.mark.parametrize("text", [
    "<tool_call>\n{broken}\n</tool_call>", "<tool_call>\n[1]\n</tool_call>",
    '<tool_call>\n{"name": "f", "arguments": 3}\n</tool_call>'])
def test_a_call_that_is_not_well_formed_stays_text(make, text):
    assert make().parse_tool_calls(text) == (text, [])


def test_reasoning_that_was_cut_off_is_reasoning_where_the_prompt_opened_it(make):
    template = make(CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    assert template.parse(template.tokenizer.encode("hm, let me")) == {
        "role": "assistant", "content": "", "reasoning_content": "hm, let me"}
    assert template.parse(template.tokenizer.encode("hm\n</think>\n\nYes.<|im_end|>")) == {
        "role": "assistant", "content": "Yes.", "reasoning_content": "hm"}


def test_a_completion_joins_its_prompt_with_labels_and_logprobs(make):
    template = make()
    prompt = {**template.encode(CHAT, add_generation_prompt=True), "user_data": {"answer": 5}}
    before = copy.deepcopy(prompt)
    joined = template.concat_input_feature(prompt, [7, 8], logprobs=[-0.5, -0.25])
    size = len(prompt["input_ids"])
    assert joined == {"input_ids": [*prompt["input_ids"], 7, 8], "labels": [IGNORE_INDEX] * size + [7, 8],
                      "old_logprobs": [0.0] * size + [-0.5, -0.25], "user_data": {"answer": 5}}
    assert prompt == before
    with pytest.raises(DataError, match="Pass `logprobs=`"):
        template.concat_input_feature(joined, [9])
    with pytest.raises(DataError, match="1 entries for 2 tokens"):
        template.concat_input_feature(prompt, [7, 8], logprobs=[0.0])


def test_a_pickled_template_encodes_the_same(make):
    template = make()
    expected = template.encode(CHAT)
    assert pickle.loads(pickle.dumps(template)).encode(CHAT) == expected


def test_stop_tokens_are_the_end_of_turn_and_the_end_of_text(make):
    template = make()
    assert template.decode([template.stop_token_ids[0]]) == "<|im_end|>"
    assert template.tokenizer.eos_token_id in template.stop_token_ids


def test_renderings_a_shape_do_not_grow_with_rows_or_turns(make, monkeypatch):
    """Linear in turns: a conversation is rendered once, and its shape a few times however many turns it has."""
    def renderings(turns, rows):
        template = make()
        calls = []
        source = template._renderer.render
        monkeypatch.setattr(template._renderer, "render", lambda *args, **kwargs: calls.append(1) or source(*args, **kwargs))
        template.batch_encode([{"messages": [QUESTION, ANSWER] * (turns // 2)}] * rows)
        return len(calls)

    assert renderings(64, 1) == renderings(8, 1) == renderings(8, 50)
    assert renderings(64, 1) <= 12


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, OSError])
def test_a_fault_that_no_template_raises_does_not_pass_for_a_refusal(make, monkeypatch, error):
    template = make()

    def fail(*args, **kwargs):
        raise error("broken library")

    monkeypatch.setattr(template.tokenizer, "apply_chat_template", fail)
    with pytest.raises(error, match="broken library"):
        _ = template.is_prefix_stable
    with pytest.raises(error, match="broken library"):
        template.encode(CHAT)
