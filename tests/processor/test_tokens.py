"""Token ids, labels and loss inputs that a model cannot take are named before anything runs."""

import numpy as np
import pytest
import torch

from twinkle_core.errors import DataError
from twinkle_core.processor import InputProcessor, Limits

LIMITS = Limits(vocab_size=10, positions=4)


def collate(*features, **inputs):
    return list(InputProcessor(micro_batch_size=1).micro_batches(list(features), inputs, limits=LIMITS))


def feature(ids, labels=None, **extra):
    return {"input_ids": ids, "labels": ids if labels is None else labels, **extra}


GOOD = feature([1, 2, 3], row_id=7)


@pytest.mark.parametrize(("bad", "text"), [
    (feature([1, 10], [1, 1]), r"inputs\[1\]: `input_ids\[1\]` is 10, but the model's vocabulary is 0 to 9\. Encode it"),
    (feature([-1, 1], [1, 1], row_id=8), r"inputs\[1\] \(row 8\): `input_ids\[0\]` is -1, .* 0 to 9"),
    (feature([1, 2], [1, 99999]), r"`labels\[1\]` is 99999, .* 0 to 9, or -100 where nothing is trained on\. Encode it"),
    (feature([1, 2], [1, -1]), r"`labels\[1\]` is -1, .* or -100"),
    (feature([1, 2], [-101, 1]), r"`labels\[0\]` is -101, .* or -100"),
    (feature([1, 1.5], [1, 1]), r"inputs\[1\]: `input_ids\[1\]` is 1\.5 of type float. Use integers"),
    (feature([1, 2], [1, None]), r"`labels\[1\]` is None of type NoneType. Use integers"),
    (feature(["a", 2], [1, 1]), r"`input_ids\[0\]` is 'a' of type str"),
    (feature([[1], 2], [1, 1]), r"`input_ids\[0\]` is \[1\] of type list"),
    (feature([2 ** 70, 2], [1, 1]), r"`input_ids` is a list that is no list of integers of 64 bits"),
    (feature([True, False], [1, 1]), r"`input_ids` is a list that is no list of integers"),
    (feature("ab", [1, 1]), r"inputs\[1\]: `input_ids` is 'ab' of type str. Use a list"),
    (feature(5, [1]), r"`input_ids` is 5 of type int. Use a list"),
    (feature([1], 3), r"`labels` is 3 of type int. Use a list"),
    (feature([1, 2], [1, 2], old_logprobs=None), r"`old_logprobs` is None of type NoneType. Use a list"),
    (feature([1, 2, 3, 4, 5], row_id=9), r"inputs\[1\] \(row 9\) has 5 tokens, but the model has 4 positions.*`max_length=4`"),
])
def test_a_feature_that_the_model_cannot_read_is_named_with_what_is_allowed(bad, text):
    batches = InputProcessor(micro_batch_size=1).micro_batches([GOOD, bad], limits=LIMITS)
    with pytest.raises(DataError, match=text):
        next(batches)  # before the first, which is good


def test_the_ends_of_what_is_allowed_are_allowed():
    batch = collate(feature([0, 9, 9, 0], [-100, 9, 0, -100]))[0]
    assert batch.input_ids_RL.tolist() == [[0, 9, 9, 0]]
    assert batch.targets_N.tolist() == [9, 0]


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.uint8)])
def test_tuples_arrays_and_tensors_of_integers_are_taken_too(kind):
    assert collate(feature(kind([1, 2, 3])))[0].input_ids_RL.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(("value", "text"), [
    ([None, 1.0], r"`advantages\[0\]` is None where `advantages\[1\]` is 1\.0. Pass one number a sequence"),
    ([None, None], r"`advantages\[0\]` is None. Pass one number a sequence"),
    (["a", "b"], r"`advantages\[0\]` is 'a'. Pass one number a sequence"),
    ("ab", r"`advantages` is 'ab'. Pass one number a sequence"),
    ({"a": 1}, r"`advantages` is \{'a': 1\}. Pass one number a sequence"),
    (1.0, r"`advantages` is 1\.0. Pass one number a sequence"),
    ([[[1.0]], [[1.0]]], r"`advantages\[0\]` is \[\[1\.0\]\]. Pass one number a sequence"),
    ([1.0, None], r"`advantages\[1\]` is None where `advantages\[0\]` is 1\.0. Pass one number a sequence"),
    ([1.0, "x"], r"`advantages\[1\]` is 'x' where"),
    ([1.0, [0.0, 0.0]], r"`advantages\[1\]` is \[0\.0, 0\.0\] where `advantages\[0\]` is 1\.0"),
    ([[0.0, 0.0], 1.0], r"`advantages\[1\]` is 1\.0 where `advantages\[0\]` is \[0\.0, 0\.0\]"),
    ([[0.0, None], [0.0, 0.0]], r"`advantages\[0\]` is \[0\.0, None\]"),
    ([[0.0, 1.0], ["a", 0.0]], r"`advantages\[1\]` is \['a', 0\.0\] where"),
])
def test_a_loss_input_that_is_no_number_is_named(value, text):
    with pytest.raises(DataError, match=text):
        collate(feature([1, 2]), feature([3, 4]), advantages=value)


def test_features_that_a_subclass_made_are_held_to_the_same():
    class Longer(InputProcessor):
        def prepare(self, features):
            return [{**item, "input_ids": [*item["input_ids"], 1]} for item in features]

    with pytest.raises(DataError, match=r"`Longer.prepare`: inputs\[0\] has 4 `input_ids` but 3 `labels`"):
        next(Longer().micro_batches([GOOD]))


def test_a_loss_input_may_be_left_out_as_none_and_its_numbers_may_be_tensors():
    numbers = [torch.tensor(1.0), np.float64(2.0)]
    batches = collate(feature([1, 2]), feature([3, 4]), advantages=numbers, ref_logprobs=None)
    assert [batch.loss_inputs["advantages"].tolist() for batch in batches] == [[1.0], [2.0]]
    assert batches[0].loss_inputs["ref_logprobs"] is None
