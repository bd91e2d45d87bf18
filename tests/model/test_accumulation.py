"""When the optimizer steps, what it divides by, and what discards gradients."""

import copy

import pytest
import torch

from twinkle_core.errors import ArgumentError, ModelError


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}


def assert_unchanged(model, before):
    for name, parameter in model.module.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize(("n", "at"), [(1, [1, 2, 3]), (2, [2, 4, 6]), (4, [4, 8, 12])])
def test_said_accumulation_steps_at_every_nth_backward_pass(n, at, build, batch):
    model = build(gradient_accumulation_steps=n)
    stepped = []
    for micro in range(1, at[-1] + 1):
        model.forward_backward(inputs=batch(6))
        if model.clip_grad_and_step():
            stepped.append(micro)
    assert stepped == at


def test_after_a_change_of_n_the_boundaries_are_those_of_the_new_n(build, batch):
    model = build(gradient_accumulation_steps=2)
    stepped = []
    for micro in range(1, 9):
        if micro == 3:
            model.state().gradient_accumulation_steps = 3
        model.forward_backward(inputs=batch(6))
        if model.step():
            stepped.append(micro)
    assert stepped == [2, 5, 8]


def test_small_micro_batches_equal_one_big_batch_though_their_token_counts_differ(build, batch):
    whole, said, done = build(), build(gradient_accumulation_steps=3), build()
    features = batch(4, 30, 9)
    for model in (whole, said, done):
        model.set_optimizer("SGD", lr=0.1)
    whole.forward_backward(inputs=features)
    assert whole.clip_grad_and_step()
    for index, feature in enumerate(features):
        said.forward_backward(inputs=[feature])
        assert said.clip_grad_and_step() is (index == 2)
        done.forward_backward(inputs=[feature])
    assert done.clip_grad_and_step()
    expected = weights(whole)
    for model in (said, done):
        for name, value in weights(model).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7, msg=name)


def test_step_consumes_the_gradient(build, batch):
    model = build()
    model.forward_backward(inputs=batch(6))
    assert model.step()
    before = weights(model)
    assert not model.step()
    assert not model.clip_grad_and_step()
    assert_unchanged(model, before)


def test_zero_grad_discards_the_gradient(build, batch):
    model, fresh = build(), build()
    model.forward_backward(inputs=batch(20, seed=1))
    model.zero_grad()
    for each in (model, fresh):
        each.forward_backward(inputs=batch(6))
        each.clip_grad_and_step()
    assert_unchanged(model, weights(fresh))


def test_zero_grad_inside_a_said_window_warns_that_step_clears_by_itself(build, batch):
    model = build(gradient_accumulation_steps=2)
    model.forward_backward(inputs=batch(6))
    assert not model.step()
    with pytest.warns(UserWarning, match=r"discarded 1 of 2 accumulated.*leave `zero_grad\(\)` out"):
        model.zero_grad()


def test_clip_grad_norm_gives_the_norm_of_the_mean_gradient_and_none_inside_a_window(build, batch, reference, run_alone):
    model, module = build(gradient_accumulation_steps=2), reference("qwen3")
    assert model.clip_grad_norm() is None
    model.forward_backward(inputs=batch(9))
    assert model.clip_grad_norm() is None
    model.forward_backward(inputs=batch(5))
    counts = [run_alone(module, batch(length))[1] for length in (9, 5)]
    for parameter in module.parameters():
        parameter.grad /= sum(counts)
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]))
    assert model.clip_grad_norm(max_norm=1e9) == pytest.approx(expected, rel=1e-5)
    assert model.clip_grad_norm(max_norm=0.25) == pytest.approx(expected, rel=1e-5)
    assert model.clip_grad_norm(max_norm=1e9) == pytest.approx(0.25, rel=1e-4)


def test_clip_then_step_equals_clip_grad_and_step(build, batch):
    apart, together = build(), build()
    for model in (apart, together):
        model.set_optimizer("SGD", lr=1.0)
        model.forward_backward(inputs=batch(9, 4))
    apart.clip_grad_norm(0.1)
    assert apart.step()
    assert together.clip_grad_and_step(0.1)
    expected = weights(together)
    for name, value in weights(apart).items():
        torch.testing.assert_close(value, expected[name], msg=name)


def test_a_scheduler_advances_once_a_step_and_never_without_one(build, batch):
    model = build(gradient_accumulation_steps=2)
    model.set_optimizer("SGD", lr=1.0)
    model.set_lr_scheduler("LambdaLR", lr_lambda=lambda step: 0.5 ** step)
    rates = []
    for _ in range(4):
        model.forward_backward(inputs=batch(6))
        model.step()
        rates.append((model.lr_step(), model.lr_step(), model.state().optimizer.param_groups[0]["lr"]))
    assert rates == [(False, False, 1.0), (True, False, 0.5), (False, False, 0.5), (True, False, 0.25)]


def test_clip_grad_and_step_advances_the_scheduler_itself(build, batch):
    model = build()
    model.set_optimizer("SGD", lr=1.0)
    model.set_lr_scheduler("LambdaLR", lr_lambda=lambda step: 0.5 ** step)
    model.forward_backward(inputs=batch(6))
    model.clip_grad_and_step()
    assert not model.lr_step()
    assert model.state().optimizer.param_groups[0]["lr"] == 0.5
    assert model.calculate_metric(is_training=True)["lr"] == 1.0  # the rate that the step was made with


def test_calculate_loss_twice_counts_once_and_forward_only_between_changes_nothing(build, batch):
    model, plain = build(), build()
    plain.forward_backward(inputs=batch(9, 4))
    output = model.forward(inputs=batch(9, 4))
    assert model.calculate_loss() == output["loss"]
    model.forward_only(inputs=batch(30, seed=5))
    assert model.calculate_loss() == output["loss"]
    model.backward()
    assert model.state().grad_count == plain.state().grad_count
    assert model.state().micro_steps == 1
    for one, other in zip(model.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert model.calculate_metric(is_training=True)["num_tokens"] == output["num_tokens"]


def test_backward_without_or_twice_after_forward_says_what_to_call(build, batch):
    model = build()
    with pytest.raises(ModelError, match=r"`backward\(\)` needs a `forward"):
        model.backward()
    with pytest.raises(ModelError, match=r"`calculate_loss\(\)` needs a `forward"):
        model.calculate_loss()
    model.forward(inputs=batch(6))
    model.backward()
    with pytest.raises(ModelError, match=r"called twice for one `forward.*Call `forward` again"):
        model.backward()


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_an_accumulation_that_is_no_positive_integer_is_refused(value, build):
    with pytest.raises(ArgumentError, match="gradient_accumulation_steps=.*integer >= 1"):
        build(gradient_accumulation_steps=value)


@pytest.mark.parametrize("value", [0, -1.0, "1", float("nan")])
def test_a_clip_that_is_no_positive_number_is_refused(value, build):
    with pytest.raises(ArgumentError, match=r"max_norm=.*a number > 0"):
        build().clip_grad_and_step(max_norm=value)


def test_each_adapter_says_its_own_accumulation(build, batch):
    model = build()
    config = {"r": 2, "target_modules": ["q_proj"]}
    model.add_adapter_to_model("one", copy.copy(config))
    model.add_adapter_to_model("two", copy.copy(config), gradient_accumulation_steps=2)
    stepped = []
    for _ in range(2):
        for name in ("one", "two"):
            model.forward_backward(inputs=batch(6), adapter_name=name)
            stepped.append(model.clip_grad_and_step(adapter_name=name))
    assert stepped == [True, False, True, True]


def test_an_adapters_accumulation_is_its_own_and_1_can_be_said(build):
    model = build(gradient_accumulation_steps=3)
    with pytest.warns(UserWarning, match="`gradient_accumulation_steps=3`.*adapter `one` has its own, 1. Say it in `add_adapter"):
        model.add_adapter_to_model("one", {"r": 2, "target_modules": ["q_proj"]}, gradient_accumulation_steps=1)
    model.add_adapter_to_model("two", {"r": 2, "target_modules": ["q_proj"]}, gradient_accumulation_steps=2)
    assert [model.state(name).gradient_accumulation_steps for name in ("one", "two")] == [1, 2]


def test_zero_grad_between_forward_and_backward_keeps_the_forward(build, batch):
    model, plain = build(), build()
    plain.forward_backward(inputs=batch(9))
    model.forward_backward(inputs=batch(30))
    model.forward(inputs=batch(9))
    model.zero_grad()
    model.backward()
    for one, other in zip(model.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_forward_only_before_backward_does_not_switch_dropout_off_in_what_is_computed_again(build, batch):
    def gradients(between):
        model = build("qwen3", gradient_checkpointing=True)
        model.add_adapter_to_model("one", {"r": 2, "target_modules": ["q_proj"], "lora_dropout": 0.5})
        torch.manual_seed(3)
        model.forward(inputs=batch(9))
        if between:
            model.forward_only(inputs=batch(9))
        model.backward()
        return [parameter.grad for parameter in model.state().parameters.values()]

    for one, other in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(one, other)


def test_what_a_patch_froze_is_not_trained(build, batch):
    model = build()
    model.apply_patch(lambda module: module.lm_head.requires_grad_(False))
    before = model.module.lm_head.weight.clone()
    model.forward_backward(inputs=batch(9))
    assert model.clip_grad_and_step()
    assert torch.equal(model.module.lm_head.weight, before)
    assert "lm_head.weight" not in model.state().parameters
