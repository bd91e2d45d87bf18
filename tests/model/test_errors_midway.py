"""A call that fails in a later micro-batch leaves no part of itself behind."""

import pytest
import torch

from twinkle_core.errors import DataError
from twinkle_core.loss.cross_entropy import CrossEntropyLoss


class FailsAt(CrossEntropyLoss):
    """Raises at its n-th call, in the forward or in the backward pass."""

    def __init__(self, call, *, backward=False):
        self.left, self.backward = call, backward

    def __call__(self, outputs, targets):
        self.left -= 1
        if not self.left and not self.backward:
            raise ZeroDivisionError("the second micro-batch")
        if not self.left:
            outputs.logprobs.register_hook(self.fail)
        return super().__call__(outputs, targets)

    def fail(self, gradient):
        raise ZeroDivisionError("the second micro-batch")


@pytest.fixture
def model(build):
    made = build()
    made.set_optimizer("SGD", lr=0.1)
    made.set_processor(micro_batch_size=1)
    made.add_metric("Accuracy")
    return made


def run(model, method, features):
    if method == "forward_backward":
        model.forward_backward(inputs=features)
    else:
        model.forward(inputs=features)
        model.backward()


CALLS = [("forward_backward", False), ("forward_backward", True), ("backward", True)]


@pytest.mark.parametrize(("method", "backward"), CALLS)
def test_gradients_counters_and_metrics_are_as_before_the_call(method, backward, model, batch):
    model.set_loss(FailsAt(2, backward=backward))
    with pytest.raises(ZeroDivisionError, match="second") as caught:
        run(model, method, batch(6, 8))
    state = model.state()
    assert all(parameter.grad is None for parameter in model.module.parameters())
    assert (state.micro_steps, state.grad_count, state.rows) == (0, 0.0, [])
    assert not getattr(caught.value, "__notes__", [])
    assert not model.step()
    if method == "forward_backward":
        assert state.training.is_empty
        assert state.metrics[0].state() == {"correct": 0.0, "tokens": 0.0}


@pytest.mark.parametrize(("method", "backward"), CALLS)
def test_gradients_held_from_earlier_calls_are_discarded_and_the_error_says_so(method, backward, model, batch):
    model.forward_backward(inputs=batch(9))
    model.set_loss(FailsAt(2, backward=backward))
    with pytest.raises(ZeroDivisionError) as caught:
        run(model, method, batch(6, 8))
    assert caught.value.__notes__ == ["The gradients of 1 backward passes before this call are discarded as well, the weights are "
                                      "unchanged. Accumulate them again."]
    assert all(parameter.grad is None for parameter in model.module.parameters())
    assert model.state().micro_steps == 0


@pytest.mark.parametrize("method", ["forward_backward", "forward"])
def test_gradients_held_stay_when_the_call_fails_before_its_first_backward_pass(method, model, batch):
    model.forward_backward(inputs=batch(9))
    held = [parameter.grad.clone() for parameter in model.module.parameters()]
    model.set_loss(FailsAt(1))
    with pytest.raises(ZeroDivisionError):
        getattr(model, method)(inputs=batch(6, 8))
    assert model.state().micro_steps == 1
    for parameter, before in zip(model.module.parameters(), held, strict=True):
        assert torch.equal(parameter.grad, before)


def test_the_next_step_is_that_of_a_model_in_which_nothing_failed(model, build, batch):
    model.set_loss(FailsAt(2))
    with pytest.raises(ZeroDivisionError):
        model.forward_backward(inputs=batch(6, 8))
    plain = build()
    plain.set_optimizer("SGD", lr=0.1)
    for each in (model, plain):
        each.set_loss("CrossEntropyLoss")
        each.set_processor()
        each.forward_backward(inputs=batch(12, 3))
        assert each.clip_grad_and_step()
    for one, other in zip(model.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_evaluation_that_fails_is_not_counted_in_part(model, batch):
    model.set_loss(FailsAt(2))
    with pytest.raises(ZeroDivisionError):
        model.forward_only(inputs=batch(6, 8))
    assert model.state().evaluation.is_empty
    assert model.state().eval_metrics[0].state() == {"correct": 0.0, "tokens": 0.0}


@pytest.mark.parametrize("method", ["forward_backward", "forward"])
def test_a_batch_without_anything_to_train_on_is_an_error_with_its_rows(method, model, batch):
    features = batch(6, 8)
    for feature in features:
        feature["labels"] = [feature["input_ids"][0]] + [-100] * (len(feature["input_ids"]) - 1)  # a first token has no target
    with pytest.raises(DataError, match=r"Nothing in this batch is trained on: .* other than -100\. .*: 100, 101\. Look at how"):
        getattr(model, method)(inputs=features)
    assert model.state().micro_steps == 0
    assert model.forward_only(inputs=features)["num_tokens"] == 0
    model.forward_backward(inputs=[*features, *batch(5)])  # a part of a batch may be such
    assert model.step()


def test_a_loss_that_counts_no_token_is_said_once(model, batch):
    model.set_loss(lambda outputs, targets: (outputs.logprobs.sum() * 0, 0))
    with pytest.warns(UserWarning, match="counted none of the 4 supervised tokens.*adds nothing to a step"):
        model.forward_backward(inputs=batch(6))
    assert not model.step()
