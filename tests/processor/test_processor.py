"""From features to tensors: the one shift, padding, pairs, inputs of the loss, and bad features."""

import pytest
import torch

from twinkle_core.errors import ArgumentError, ArgumentTypeError, DataError, UnknownArgumentError
from twinkle_core.processor import InputProcessor, build_processor


def feature(*ids, labels=None, **extra):
    return {"input_ids": list(ids), "labels": list(ids) if labels is None else labels, **extra}


def only(processor, features, **inputs):
    batches = list(processor.micro_batches(features, inputs))
    assert len(batches) == 1
    return batches[0]


def test_labels_are_shifted_once_and_the_last_position_has_no_target():
    batch = only(InputProcessor(), [feature(5, 6, 7), feature(8, 9, labels=[-100, 9])])
    assert batch.input_ids_RL.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.targets_BT.tolist() == [[6, 7, -100], [9, -100, -100]]
    assert batch.source_N.tolist() == batch.place_N.tolist() == [0, 1, 3]
    assert batch.targets_N.tolist() == [6, 7, 9]
    assert (batch.num_tokens, batch.lengths) == (3, [3, 2])


def test_a_sequence_of_length_one_survives_without_a_target():
    batch = only(InputProcessor(), [feature(5)])
    assert batch.input_ids_RL.tolist() == [[5]]
    assert batch.targets_BT.tolist() == [[-100]]
    assert batch.num_tokens == 0


def test_a_packed_row_has_no_padding_and_knows_where_each_position_belongs():
    processor = InputProcessor(packing=True)
    processor.row_cost = None
    batch = only(processor, [feature(1, 2), feature(3, 4, 5), feature(6)])
    assert batch.input_ids_RL.tolist() == [[3, 4, 5, 1, 2, 6]]
    assert batch.position_ids_RL is not None
    assert batch.position_ids_RL.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch.targets_BT.tolist() == [[2, -100, -100], [4, 5, -100], [-100, -100, -100]]
    assert batch.source_N.tolist() == [0, 1, 3]
    assert batch.place_N.tolist() == [3, 4, 0]
    assert batch.targets_N.tolist() == [4, 5, 2]


def test_no_features_give_no_micro_batches():
    assert list(InputProcessor(micro_batch_size=2).micro_batches([])) == []


def test_micro_batches_keep_order_and_never_part_a_pair():
    features = [feature(1, 2, row_id=0), feature(1, 3, pair_id=4), feature(1, 4, pair_id=4), feature(1, 5, pair_id=5),
                feature(1, 6, pair_id=5), feature(1, 7)]
    batches = InputProcessor(micro_batch_size=2).micro_batches(features, {"advantages": [1, 2, 3, 4, 5, 6]})
    assert [batch.loss_inputs["advantages"].tolist() for batch in batches] == [[1, 2, 3], [4, 5, 6]]
    sizes = [len(batch.lengths) for batch in InputProcessor(micro_batch_size=1).micro_batches(features)]
    assert sizes == [1, 2, 2, 1]


def test_loss_inputs_are_aligned_with_the_position_that_predicts_the_token():
    batch = only(InputProcessor(), [feature(5, 6, 7), feature(8)],
                 old_logprobs=[[0.0, -1.0, -2.0], [0.0]], beta=0.1, names=["a", "b"])
    torch.testing.assert_close(batch.loss_inputs["old_logprobs"], torch.tensor([[-1.0, -2.0, 0.0], [0.0, 0.0, 0.0]]))
    assert batch.loss_inputs["beta"] == 0.1
    assert batch.loss_inputs["names"] == ["a", "b"]


@pytest.mark.parametrize(("bad", "text"), [
    ({"labels": [1]}, r"inputs\[1\] has no `input_ids`"),
    (feature(1, 2, labels=[1]), r"inputs\[1\] has 2 `input_ids` but 1 `labels`"),
    ({"input_ids": [1, 2]}, r"inputs\[1\] has no `labels`.*without `add_generation_prompt`"),
    (feature(1, attention_mask=[1]), r"inputs\[1\] has the unknown key `attention_mask`"),
    ([1, 2], r"inputs\[1\] is a list, not a feature"),
])
def test_a_bad_feature_is_an_error_that_says_which_and_what(bad, text):
    with pytest.raises(DataError, match=text):
        list(InputProcessor().micro_batches([feature(1, 2), bad]))


def test_inputs_of_another_length_are_an_error_with_both_numbers():
    with pytest.raises(DataError, match="`advantages` has 3 entries, `inputs` has 1 sequences"):
        list(InputProcessor().micro_batches([feature(1, 2)], {"advantages": [1.0, 2.0, 3.0]}))
    with pytest.raises(DataError, match=r"`ref_logprobs\[0\]` has 3 entries, the sequence has 2 tokens"):
        list(InputProcessor().micro_batches([feature(1, 2)], {"ref_logprobs": [[0.0, 0.0, 0.0]]}))


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
def test_a_micro_batch_size_that_is_no_positive_integer_is_refused(size):
    with pytest.raises(ArgumentError, match=r"micro_batch_size=.*an integer >= 1, or None"):
        InputProcessor(micro_batch_size=size)


def test_a_subclass_may_change_features_but_not_their_number():
    class Clip(InputProcessor):
        def prepare(self, features):
            return [{**item, "input_ids": item["input_ids"][:2], "labels": item["labels"][:2]} for item in features]

    class Drop(InputProcessor):
        def prepare(self, features):
            return features[1:]

    assert only(Clip(), [feature(1, 2, 3)]).input_ids_RL.tolist() == [[1, 2]]
    with pytest.raises(DataError, match=r"`Drop.prepare` returned 1 features for 2"):
        list(Drop().micro_batches([feature(1, 2), feature(3, 4)]))


def test_set_processor_takes_a_class_an_instance_or_options():
    class Own(InputProcessor):
        pass

    options = {"micro_batch_size": 3, "packing": False}
    assert isinstance(build_processor(Own, options), Own)
    assert build_processor(None, options).micro_batch_size == 3
    made = Own()
    assert build_processor(made, {"micro_batch_size": None, "packing": False}) is made
    with pytest.raises(ArgumentTypeError, match="got an instance together with options"):
        build_processor(made, options)
    with pytest.raises(ArgumentTypeError, match="a subclass or an instance of `InputProcessor`"):
        build_processor("InputProcessor", options)
    with pytest.raises(UnknownArgumentError, match="no argument `pad_token`. Did you mean `pad_token_id`"):
        build_processor(None, {"pad_token": 1})
