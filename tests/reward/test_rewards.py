"""Rewards: what each sees of a response or a conversation, and what it gives for it."""

import subprocess
import sys
import threading
import time

import pytest

from twinkle.reward import FormatReward, FunctionReward, GSM8KAccuracyReward, GSM8KFormatReward, MathReward, TextReward
from twinkle_core.data_format import SampledSequence, SampleResponse
from twinkle_core.errors import ArgumentError, ArgumentTypeError, DataError, MissingExtraError, UnknownArgumentError


def response(*texts, user_data=None):
    feature = {"input_ids": [1]} | ({} if user_data is None else {"user_data": user_data})
    return SampleResponse(sequences=[
        SampledSequence(tokens=[], logprobs=[], decoded=text, stop_reason="stop", new_input_feature=feature) for text in texts])


def chat(text, **more):
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": text, **more}]}


@pytest.mark.parametrize(("text", "expected"), [
    ("6 * 12 is 72.\n#### 72", 1.0), ("#### 72.0", 1.0), ("#### $72", 1.0), ("so \\boxed{72}", 1.0), ("It is 72.", 1.0),
    ("60 and 12 make 72", 1.0), ("#### 71\n#### 72", 1.0), ("72\n#### 73", 0.0), ("72 \\boxed{7}", 0.0), ("####", 0.0),
    ("#### none\n72", 0.0), ("-72", 0.0), ("no idea", 0.0), ("", 0.0)])
def test_gsm8k_accuracy_compares_the_final_number(text, expected):
    assert GSM8KAccuracyReward()([response(text)], [{"ground_truth": "72"}]) == [expected]


@pytest.mark.parametrize(("text", "truth"), [("#### 1,234", "1234"), ("#### 1234", "1,234"), ("#### -3", "-3"), ("#### .5", 0.5),
                                             ("#### -$1,000.50", "-1000.5"), ("#### 12,", 12)])
def test_gsm8k_accuracy_reads_numbers_as_people_write_them(text, truth):
    assert GSM8KAccuracyReward()([response(text)], [{"ground_truth": truth}]) == [1.0]


@pytest.mark.parametrize(("text", "expected"), [
    ("First.\n#### 72", 1.0), ("#### 72", 1.0), ("x\n#### $1,234.5\n", 1.0), ("x\n#### 72.", 1.0), ("The answer is #### 72", 0.0),
    ("#### 72\nThank you", 0.0), ("#### seventy", 0.0), ("72", 0.0), ("", 0.0)])
def test_gsm8k_format_wants_the_last_line(text, expected):
    assert GSM8KFormatReward()([response(text)]) == [expected]


@pytest.mark.parametrize(("text", "expected"), [
    ("<think>a\nb</think>\n<answer>c</answer>", 1.0), ("  <think></think><answer></answer>\n", 1.0),
    ("<think>a</think>c", 0.0), ("x <think>a</think><answer>c</answer>", 0.0),
    ("<think>a</think><think>b</think><answer>c</answer>", 0.0), ("<answer>c</answer><think>a</think>", 0.0)])
def test_the_default_format_is_reasoning_and_answer_in_tags_each_once(text, expected):
    assert FormatReward()([response(text)]) == [expected]


def test_a_format_of_ones_own_must_match_the_whole():
    reward = FormatReward(r"yes|no: .+")
    assert reward([response("yes", "no: it\nrains", "yes!", "no: ")]) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(("text", "truth", "expected"), [
    (r"So \boxed{\frac{1}{2}}.", "0.5", 1.0), (r"$x = \frac{2}{4}$", r"\frac{1}{2}", 1.0),
    (r"\boxed{2\sqrt{2}}", r"$\sqrt{8}$", 1.0),
    (r"\boxed{(1, 2)}", "(1,2)", 1.0), ("The answer is 42", 42, 1.0), (r"\boxed{\frac{1}{3}}", "0.5", 0.0), ("no idea", "1", 0.0),
    (r"\boxed{\frac{1}{", "1", 0.0)])
def test_math_reward_compares_values_not_texts(text, truth, expected):
    assert MathReward()([response(text)], [{"ground_truth": truth}]) == [expected]


def test_math_reward_works_in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(MathReward()([response(r"\boxed{3}")], [{"ground_truth": "3"}])))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_math_reward_gives_up_on_an_answer_that_takes_too_long():
    begin = time.monotonic()
    assert MathReward(timeout_s=1)([response(r"\boxed{9^{9^{9^{9^{9}}}}}")], [{"ground_truth": "9^{9^{9^{9^{8}}}}"}]) == [0.0]
    assert time.monotonic() - begin < 20


def test_math_reward_without_its_library_says_what_to_install():
    script = ("import sys; sys.modules['math_verify'] = None\nfrom twinkle.reward import MathReward\n"
              "try:\n    MathReward()\nexcept ImportError as error:\n    print(type(error).__name__, error)")
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.stdout == (f"{MissingExtraError.__name__} `MathReward` needs math-verify, which is not installed. "
                          "Run: pip install 'twinkle-core[rewards]'\n"), run.stderr


def test_every_sequence_of_every_response_gets_a_number_in_order():
    reward = FunctionReward(lambda text, data: len(text) + data.get("bonus", 0))
    responses = [response("a", "bb"), response(), response("ccc")]
    assert reward(responses) == [1.0, 2.0, 3.0]
    assert reward(responses, [{"bonus": 10}, None, {"bonus": 20}]) == [11.0, 12.0, 23.0]


def test_user_data_comes_from_the_rows_where_it_is_not_given():
    reward = GSM8KAccuracyReward(key="answer")
    of_row = chat("3") | {"user_data": {"answer": "3"}}
    assert reward([response("#### 1", "#### 2", user_data={"answer": "2"}), of_row]) == [0.0, 1.0, 1.0]


def test_a_sampler_carries_user_data_to_the_reward():
    from twinkle_core.sampler.torch_sampler import TorchSampler

    sampler = TorchSampler("tiny://qwen3", device="cpu")
    sampler.set_template("Qwen3Template")
    row = {"messages": [{"role": "user", "content": "2 + 2?"}], "user_data": {"ground_truth": "4"}}
    seen = []
    FunctionReward(lambda text, data: seen.append(data) or 0.0)(sampler.sample([row], {"max_tokens": 2, "num_samples": 2}))
    assert seen == [{"ground_truth": "4"}] * 2


def test_of_a_conversation_the_last_answer_counts_with_its_reasoning():
    seen = []
    FunctionReward(lambda text, data: seen.append(text) or 0.0)(
        [chat("b", reasoning_content="a"), chat([{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]), chat(None)])
    assert seen == ["<think>a</think>\nb", "xy", ""]


class Length(TextReward):
    def score(self, completion, user_data):
        return len(completion)


@pytest.mark.parametrize(("arguments", "text"), [
    (([response("a")], []), "`user_data` has 0 entries for 1 responses. Pass one a response"),
    (([{"messages": [{"role": "user", "content": "?"}]}],), r"responses\[0\] is neither .* nor a conversation that ends with"),
    ((["text"],), r"responses\[0\] is neither a `SampleResponse`"),
    ((response("a"),), "got a SampleResponse. Pass a list of responses"),
])
def test_what_is_no_answer_is_refused(arguments, text):
    with pytest.raises(DataError, match=text):
        Length()(*arguments)


@pytest.mark.parametrize("reward", [GSM8KAccuracyReward(), MathReward()])
def test_a_row_without_a_reference_answer_says_how_to_bring_it_there(reward):
    with pytest.raises(DataError, match=r"in `user_data\['ground_truth'\]`, and the row has `answer`. Map the dataset by"):
        reward([response("1")], [{"answer": "1"}])


def test_a_reference_answer_that_is_no_number_points_to_math_reward():
    with pytest.raises(DataError, match=r"is 'one half', which is no number. Use `MathReward`"):
        GSM8KAccuracyReward()([response("1")], [{"ground_truth": "one half"}])


def test_arguments_that_make_no_sense_are_refused():
    with pytest.raises(ArgumentError, match=r"`pattern='\('` is no regular expression: .*Escape what is meant"):
        FormatReward("(")
    with pytest.raises(ArgumentTypeError, match="`pattern=3` is of type int"):
        FormatReward(3)
    with pytest.raises(UnknownArgumentError, match="`FormatReward` has no argument `patern`. Did you mean `pattern`"):
        FormatReward(patern="x")
    with pytest.raises(ArgumentError, match="`timeout_s=0`: use an integer >= 1"):
        MathReward(timeout_s=0)
