"""`encode()`: what it stores, what it says, what it leaves out, and when it refuses."""

import pytest

from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.errors import ArgumentError, ArgumentTypeError, DataError, ModeError, TemplateError, UnknownArgumentError


def codes(text):
    return [ord(letter) for letter in text]


def turns(*pairs):
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def dataset_of(rows, template):
    dataset = Dataset(DatasetMeta(data=rows)) if isinstance(rows, list) else Dataset(rows)
    dataset.set_template(template)
    return dataset


def test_an_encoded_row_has_tokens_labels_and_user_data_only(letters):
    dataset = dataset_of([{"query": "ab", "response": "c", "tag": "en", "user_data": {"x": [1, None]}},
                          {"query": "d", "response": "e", "tag": "en", "user_data": None}], letters())
    dataset.encode()
    assert dataset[:] == [
        {"input_ids": codes("abc"), "labels": [-100, -100, ord("c")], "user_data": {"x": [1, None]}},
        {"input_ids": codes("de"), "labels": [-100, ord("e")]},
    ]
    assert all(type(token) is int for token in dataset[0]["input_ids"])


def test_the_layout_is_said_once_with_what_is_left_out(letters, capsys):
    dataset = dataset_of([{"query": "a", "response": "b", "tag": "en"}], letters())
    dataset.add_dataset(DatasetMeta(data=[{"query": "a", "response": "b", "tag": "en"}]))
    dataset.encode()
    assert capsys.readouterr().err == (
        "twinkle: rows are read as the layout query/response (columns query, response; left out: tag)\n")


def test_an_unknown_layout_lists_the_columns(letters):
    with pytest.raises(DataError, match="The columns `answer`, `question` are no layout that is known"):
        dataset_of([{"question": "a", "answer": "b"}], letters()).encode()


def test_a_preference_row_is_one_item_with_two_sides(encoded):
    dataset = encoded([{"prompt": "a", "chosen": "b", "rejected": "cd", "user_data": {"x": 1}}])
    assert len(dataset) == 1
    assert dataset[0] == {
        "chosen": {"input_ids": codes("ab"), "labels": [-100, ord("b")]},
        "rejected": {"input_ids": codes("acd"), "labels": [-100, *codes("cd")]},
        "user_data": {"x": 1},
    }


def test_text_is_encoded_without_a_conversation(encoded):
    assert encoded([{"text": "ab"}])[0] == {"input_ids": codes("ab"), "labels": codes("ab")}


def test_prompts_lose_the_last_assistant_message_and_have_no_labels(letters):
    class Unlabelled(letters):
        def batch_encode(self, trajectories, *, add_generation_prompt=False):
            return [[{"input_ids": feature["input_ids"]} for feature in row] for row in super().batch_encode(trajectories)]

    dataset = dataset_of([{"query": "ab", "response": "c"}], Unlabelled())
    dataset.encode(add_generation_prompt=True)
    assert dataset[:] == [{"input_ids": codes("ab"), "labels": [-100, -100]}]


def test_encoding_gives_the_template_large_batches(letters):
    template = letters()
    dataset_of([{"query": "a", "response": "b"}] * 2500, template).encode()
    assert template.batches == [1000, 1000, 500]


def test_two_processes_give_the_same_tokens_in_the_same_order(letters):
    rows = [{"query": str(i), "response": "x" * (i % 7 + 1)} for i in range(2300)]
    one, two = dataset_of(rows, letters(max_length=9)), dataset_of(rows, letters(max_length=9))
    one.encode()
    two.encode(num_proc=2)
    assert one[:] == two[:]


def test_a_template_error_names_the_row_of_the_dataset_its_file_and_its_line(letters, jsonl):
    rows = [turns(("user", "a"), ("assistant", "b"))] * 1200 + [turns(("user", "a"), ("broken", "b"))]
    dataset = dataset_of(jsonl(rows), letters())
    with pytest.raises(TemplateError, match=r"In row 1200, turn 1: \(.*rows\.jsonl:1201\) the role `broken` cannot be "
                                            r"rendered") as caught:
        dataset.encode()
    assert (caught.value.row, caught.value.turn) == (1200, 1)
    with pytest.raises(ModeError, match="needs"):
        Dataset().encode()
    assert dataset[0] == rows[0], "a failed encode changes nothing"


def test_the_row_number_counts_the_rows_of_earlier_parts(letters):
    dataset = dataset_of([turns(("user", "a"), ("assistant", "b"))] * 3, letters())
    dataset.add_dataset(DatasetMeta(data=[turns(("user", "a")), turns(("broken", "b"))]))
    with pytest.raises(TemplateError, match=r"In row 4, turn 0: \(data\[1\]\)"):
        dataset.encode()


def test_a_row_of_the_wrong_shape_names_row_file_and_line(letters, jsonl):
    path = jsonl([{"query": "a", "response": "b"}, {"query": "a"}])
    with pytest.raises(DataError, match=r"Reading a conversation failed in row 1 \(.*rows\.jsonl:2\): the column `response` is "
                                        r"empty"):
        dataset_of(path, letters()).encode()


def test_every_bad_row_is_skipped_and_counted_and_no_other(letters, capsys):
    good = turns(("user", "a"), ("assistant", "b"))
    rows = [good, turns(("broken", "x")), {"messages": []}, good, turns(("broken", "y")), good]
    dataset = dataset_of(rows, letters())
    dataset.encode(on_bad_row="skip")
    assert dataset[:] == [{"input_ids": codes("ab"), "labels": [-100, ord("b")]}] * 3
    said = capsys.readouterr().err
    assert "encode: 3 of 6 rows were skipped" in said
    assert "2 x the role `broken` cannot be rendered. (first: row 1 (data[1]))" in said
    assert ("1 x the column `messages` holds no message. A conversation has at least one turn; remove the row. (first: row 2 "
            "(data[2]))") in said


def test_rows_that_truncation_drops_are_counted(letters, capsys):
    dataset = dataset_of([{"query": "a", "response": "b" * i} for i in range(1, 6)], letters(max_length=3))
    dataset.encode()
    assert [len(row["input_ids"]) for row in dataset] == [2, 3]
    assert "encode: 3 of 5 rows were dropped by truncation" in capsys.readouterr().err


def test_dropping_every_row_is_an_error(letters):
    with pytest.raises(DataError, match=r"`encode` leaves no row: 2 of 2 rows were dropped by truncation .* or use a larger "
                                        r"`max_length`"):
        dataset_of([{"query": "aaa", "response": "bbb"}] * 2, letters(max_length=3)).encode()


def test_a_split_row_becomes_several_items_with_the_same_user_data(letters):
    dataset = dataset_of([{"query": "a", "response": "bcd", "user_data": {"x": 1}}], letters(max_length=2, pieces=True))
    dataset.encode()
    assert dataset[:] == [
        {"input_ids": codes("ab"), "labels": [-100, ord("b")], "user_data": {"x": 1}},
        {"input_ids": codes("cd"), "labels": codes("cd"), "user_data": {"x": 1}},
    ]


def test_a_pair_is_dropped_whole_and_never_split(letters, capsys):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "ccc"}]
    dataset = dataset_of(rows, letters(max_length=2))
    dataset.encode()
    assert len(dataset) == 1
    assert "1 of 2 rows were dropped" in capsys.readouterr().err
    with pytest.raises(DataError, match=r'row 1 \(data\[1\]\) truncation split an answer.*Use another `truncation_strategy`'):
        dataset_of(rows, letters(max_length=2, pieces=True)).encode()


def test_pairs_and_conversations_do_not_mix(letters):
    dataset = dataset_of([{"prompt": "a", "chosen": "b", "rejected": "c"}], letters())
    dataset.add_dataset(DatasetMeta(data=[{"query": "a", "response": "b"}]))
    with pytest.raises(DataError, match="Put them into two datasets"):
        dataset.encode()


def test_calls_in_the_wrong_order_are_errors_that_say_the_right_one(letters, encoded):
    with pytest.raises(ModeError, match=r"`encode` needs a template\. Call `dataset\.set_template\("):
        Dataset(DatasetMeta(data=[{"text": "a"}])).encode()
    dataset = encoded([{"text": "a"}])
    calls = (dataset.encode, lambda: dataset.map(len), lambda: dataset.add_dataset(DatasetMeta(data=[{"text": "b"}])))
    for call in calls:
        with pytest.raises(ModeError, match=r"this dataset is encoded already\. Call it before `encode`, which is called once"):
            call()
    with pytest.raises(ArgumentError, match='use "raise" or "skip"'):
        Dataset().encode(on_bad_row="replace")
    with pytest.raises(UnknownArgumentError, match="Did you mean `num_proc`"):
        Dataset().encode(num_procs=2)


def test_set_template_takes_a_class_with_options_an_instance_or_a_name(letters):
    dataset = Dataset(DatasetMeta(data=[{"text": "abc"}]))
    dataset.set_template(letters, max_length=2, pieces=True)
    with pytest.raises(UnknownArgumentError, match=r"`set_template\(LetterTemplate\)` has no argument `maxlength`\. Did you mean "
                                                   r"`max_length`"):
        dataset.set_template(letters, maxlength=2)
    with pytest.raises(ArgumentTypeError, match="`set_template` got 3 of type int"):
        dataset.set_template(3)
    with pytest.raises(ArgumentTypeError, match="missing a required argument: 'model_id'"):
        dataset.set_template("Template")
    dataset.encode()
    assert len(dataset) == 2


def test_rows_in_memory_are_not_mutated(letters):
    row = {"messages": [{"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": "b"}]}
    before = {"messages": [dict(message) for message in row["messages"]]}
    dataset_of([row], letters()).encode()
    assert row == before


def test_the_real_template_encodes_the_rows_of_the_hub(ms_cache):
    dataset = Dataset(DatasetMeta("ms://swift/self-cognition", data_slice=range(8)))
    dataset.map("SelfCognitionProcessor", model_name="Twinkle", model_author="Ada")
    rows = dataset[:]
    dataset.set_template("Template", model_id="ms://Qwen/Qwen3.5-4B")
    dataset.encode()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ms_cache / "models" / "Qwen" / "Qwen3___5-4B")
    for row, feature in zip(rows, dataset, strict=True):
        assert feature["input_ids"] == tokenizer.apply_chat_template(row["messages"], return_dict=False)
        answer = tokenizer.decode([label for label in feature["labels"] if label != -100])
        assert answer == row["messages"][1]["content"] + "<|im_end|>"
