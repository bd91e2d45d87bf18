"""The preprocessors that come with the core, and functions as preprocessors."""

import pytest

from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.errors import ArgumentTypeError, DataError, UnknownArgumentError, UnknownNameError
from twinkle_core.preprocessor.builtin import AlpacaProcessor, FunctionPreprocessor, GSM8KProcessor, SelfCognitionProcessor

GSM8K = {"question": "Tom has 1,000 nuts and eats 2. How many are left?", "answer": "He has <<1000-2=998>>998 left.\n#### 1,998"}


def contents(trajectory):
    return [(message["role"], message["content"]) for message in trajectory["messages"]]


def test_self_cognition_fills_in_the_name_of_the_row_s_language():
    processor = SelfCognitionProcessor(model_name=("小闪", "Twinkle"), model_author="Ada")
    english = processor({"query": "Who is {{NAME}}?", "response": "{{NAME}} by {{AUTHOR}}, {{NAME}}.", "tag": "en"})
    chinese = processor({"query": "你是谁？", "response": "我是{{NAME}}，{{AUTHOR}}。", "tag": "zh"})
    assert contents(english) == [("user", "Who is Twinkle?"), ("assistant", "Twinkle by Ada, Twinkle.")]
    assert contents(chinese) == [("user", "你是谁？"), ("assistant", "我是小闪，Ada。")]


def test_self_cognition_of_the_hub_leaves_no_placeholder(ms_cache):
    dataset = Dataset(DatasetMeta("ms://swift/self-cognition"))
    dataset.map("SelfCognitionProcessor", model_name="Twinkle", model_author="Ada")
    assert len(dataset) == 108
    assert not any("{{" in message["content"] for row in dataset for message in row["messages"])


def test_alpaca_puts_the_input_on_the_line_after_the_instruction():
    processor = AlpacaProcessor()
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert contents(processor(row)) == [("user", "Add.\n1 2"), ("assistant", "3")]
    for row in ({"instruction": "Hi", "input": "", "output": "Ho"}, {"instruction": "Hi", "input": None, "output": "Ho"},
                {"instruction": "Hi", "output": "Ho"}):
        assert contents(processor(row)) == [("user", "Hi"), ("assistant", "Ho")]


def test_gsm8k_puts_the_final_number_into_user_data():
    trajectory = GSM8KProcessor(system="Think.")(GSM8K)
    assert contents(trajectory) == [("system", "Think."), ("user", GSM8K["question"]), ("assistant", GSM8K["answer"])]
    assert trajectory["user_data"] == {"ground_truth": "1998"}


@pytest.mark.parametrize(("processor", "row", "message"), [
    (SelfCognitionProcessor("a", "b"), {"query": "q", "response": "r", "tag": "fr"}, "the column `tag` holds 'fr'. Known "
                                                                                     "languages: `en`, `zh`"),
    (SelfCognitionProcessor("a", "b"), {"query": "q", "tag": "en"}, r"the column `response` is missing or empty\. .*The row has: "
                                                                    r"`query`, `tag`"),
    (AlpacaProcessor(), {"instruction": 3, "output": "x"}, "the column `instruction` holds a int. It must be text"),
    (GSM8KProcessor(), {"question": "q", "answer": "no number"}, "has no final number after `####`: 'no number'"),
])
def test_a_wrong_row_is_an_error_that_names_the_column(processor, row, message):
    with pytest.raises(DataError, match=message):
        processor(row)


def test_names_are_a_text_or_a_pair():
    with pytest.raises(ArgumentTypeError, match=r"`model_name=3`: use a text, or a pair \(zh, en\) of texts"):
        SelfCognitionProcessor(model_name=3, model_author="b")


@pytest.mark.parametrize("processor", [
    AlpacaProcessor, AlpacaProcessor(), "AlpacaProcessor", lambda row: {"messages": AlpacaProcessor()(row)["messages"]}])
def test_map_takes_a_class_an_instance_a_name_and_a_function(processor):
    dataset = Dataset(DatasetMeta(data=[{"instruction": "Hi", "input": "", "output": "Ho"}]))
    dataset.map(processor)
    assert dataset[0] == {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}


def test_map_refuses_what_is_none_of_these():
    dataset = Dataset(DatasetMeta(data=[{"x": 1}]))
    with pytest.raises(ArgumentTypeError, match="`map` got 3 of type int"):
        dataset.map(3)
    with pytest.raises(UnknownNameError, match="Did you mean `AlpacaProcessor`"):
        dataset.map("AlpacaProcesor")


def test_a_misspelt_argument_of_map_or_of_the_class_has_near_matches():
    dataset = Dataset(DatasetMeta(data=[{"x": 1}]))
    with pytest.raises(UnknownArgumentError, match=r"`map\(SelfCognitionProcessor\)` has no argument `model_nam`\. Did you mean "
                                                   r"`model_name`"):
        dataset.map("SelfCognitionProcessor", model_nam="a", model_author="b")
    with pytest.raises(UnknownArgumentError, match=r"`map` has no argument `num_procs`\. Did you mean `num_proc`"):
        dataset.map(lambda row: row, num_procs=2)
    with pytest.raises(ArgumentTypeError, match=r"`map\(SelfCognitionProcessor\)`: missing a required argument: "
                                                r"'model_author'"):
        dataset.map("SelfCognitionProcessor", model_name="a")


def test_a_function_gets_a_row_of_its_own():
    row = {"x": 1}
    FunctionPreprocessor(lambda row: row.update(x=2) or {"y": row["x"]})(row)
    assert row == {"x": 1}


def test_a_function_that_returns_no_row_is_an_error_that_names_it():
    def forgets(row):
        row["x"] = 2

    with pytest.raises(DataError, match="`forgets` returned None of type NoneType. Return a dict .*use `dataset.filter`"):
        FunctionPreprocessor(forgets)({"x": 1})
