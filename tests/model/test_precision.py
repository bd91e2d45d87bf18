"""Dtypes of weights and arithmetic, and the loss scale of fp16."""

import pytest
import torch

from twinkle_core.errors import ArgumentError, ArgumentTypeError
from twinkle_core.model.precision import LossScaler

LORA = {"r": 2, "target_modules": "all-linear"}


def dtypes(model, *, trained):
    mine = {id(parameter) for parameter in model.state().parameters.values()}
    return {parameter.dtype for parameter in model.module.parameters() if (id(parameter) in mine) is trained}


def test_a_bf16_checkpoint_is_trained_as_a_whole_in_fp32(build, batch):
    model = build("qwen3_bf16", dtype=None)
    model.forward_backward(inputs=batch(6))
    assert dtypes(model, trained=True) == {torch.float32}
    assert model.precision.arithmetic == torch.float32


def test_under_lora_frozen_weights_stay_bf16_and_adapters_are_fp32(build, batch):
    model = build("qwen3_bf16", dtype=None)
    model.add_adapter_to_model("one", LORA)
    model.add_adapter_to_model("two", LORA)
    for name in ("one", "two"):
        model.forward_backward(inputs=batch(6), adapter_name=name)
        parameters = model.state(name).parameters.values()
        assert {parameter.dtype for parameter in parameters} == {torch.float32}
        assert {parameter.grad.dtype for parameter in parameters} == {torch.float32}
    assert {p.dtype for n, p in model.module.named_parameters() if "lora_" not in n} == {torch.bfloat16}
    assert model.precision.arithmetic == torch.bfloat16


def test_an_evaluation_before_the_first_adapter_leaves_the_checkpoints_dtype_to_it(build, batch):
    model = build("qwen3_bf16", dtype=None)
    before = {name: parameter.clone() for name, parameter in model.module.named_parameters()}
    model.forward_only(inputs=batch(6))
    model.add_adapter_to_model("one", LORA)
    assert dtypes(model, trained=False) == {torch.bfloat16}
    for name, parameter in model.module.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, before[name.replace(".base_layer", "")])


def test_weights_that_were_trained_keep_fp32_when_an_adapter_comes(build, batch):
    model = build("qwen3_bf16", dtype=None)
    model.forward_backward(inputs=batch(6))
    model.clip_grad_and_step()
    model.add_adapter_to_model("one", LORA)
    assert dtypes(model, trained=False) == {torch.float32}


def test_mixed_precision_no_computes_in_fp32_under_lora(build, batch):
    model = build("qwen3_bf16", dtype=None, mixed_precision="no")
    model.add_adapter_to_model("one", LORA)
    assert dtypes(model, trained=False) == {torch.float32}
    assert model.precision.arithmetic == torch.float32


def test_mixed_precision_bf16_is_near_fp32_and_keeps_fp32_weights(build, batch):
    exact, mixed = build(dtype=None), build(dtype=None, mixed_precision="bf16")
    expected = exact.forward_backward(inputs=batch(9, 14))["loss"]
    assert mixed.forward_backward(inputs=batch(9, 14))["loss"] == pytest.approx(expected, rel=0.02)
    assert mixed.forward_only(inputs=batch(9, 14))["loss"] != pytest.approx(expected, rel=1e-6)
    assert dtypes(mixed, trained=True) == {torch.float32}
    assert mixed.clip_grad_norm(1e9) == pytest.approx(exact.clip_grad_norm(1e9), rel=0.05)


def test_fp16_scales_the_loss_and_gives_the_norm_without_the_scale(build, batch):
    exact, scaled = build(dtype=None), build(dtype=None, mixed_precision="fp16")
    for model in (exact, scaled):
        model.forward_backward(inputs=batch(9, 14))
    assert scaled.state().scaler.scale == 1024
    assert scaled.clip_grad_norm(1e9) == pytest.approx(exact.clip_grad_norm(1e9), rel=0.02)
    before = {name: parameter.clone() for name, parameter in scaled.module.named_parameters()}
    for model in (exact, scaled):
        model.set_optimizer("SGD", lr=0.1)
        assert model.clip_grad_and_step()
    theirs = dict(exact.module.named_parameters())
    for name, parameter in scaled.module.named_parameters():
        step, expected = (parameter - before[name]).detach(), (theirs[name] - before[name]).detach()
        assert float((step - expected).norm()) <= 0.03 * float(expected.norm()) + 1e-6, name


def test_a_step_that_the_scaler_skips_changes_nothing_and_does_not_advance_the_scheduler(build, batch):
    model = build(dtype=None, mixed_precision="fp16")
    model.set_optimizer("SGD", lr=1.0)
    model.set_lr_scheduler("LambdaLR", lr_lambda=lambda step: 0.5 ** step)
    before = {name: parameter.clone() for name, parameter in model.module.named_parameters()}
    model.forward_backward(inputs=batch(9))
    model.module.lm_head.weight.grad[0, 0] = float("inf")
    assert not model.clip_grad_and_step()
    assert not model.lr_step()
    assert model.state().scaler.scale == 512
    assert (model.state().step, model.state().optimizer.param_groups[0]["lr"]) == (0, 1.0)
    for name, parameter in model.module.named_parameters():
        assert torch.equal(parameter, before[name])
    model.forward_backward(inputs=batch(9))
    assert model.clip_grad_and_step()
    assert (model.state().step, model.state().optimizer.param_groups[0]["lr"]) == (1, 0.5)


def test_the_scale_halves_at_an_overflow_and_doubles_after_good_steps():
    scaler = LossScaler(scale=8.0, growth_interval=2)
    scales = []
    for overflowed in (False, True, False, False, False):
        scaler.update(overflowed=overflowed)
        scales.append(scaler.scale)
    assert scales == [8.0, 4.0, 4.0, 8.0, 8.0]


def test_a_bad_dtype_is_refused_with_those_allowed(build):
    with pytest.raises(ArgumentError, match=r"dtype='bfloat6'.*Did you mean `bfloat16`.*float32"):
        build(dtype="bfloat6")
    with pytest.raises(ArgumentTypeError, match=r"dtype=torch.int8.*floating"):
        build(dtype=torch.int8)
    with pytest.raises(ArgumentError, match=r"mixed_precision='fp8'.*`bf16`, `fp16`, `no`"):
        build(mixed_precision="fp8")
