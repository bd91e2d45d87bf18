"""A copied model trains on as the model does, with what it holds."""

import copy

import pytest
import torch

LORA = {"r": 2, "target_modules": ["q_proj"]}


@pytest.mark.filterwarnings("ignore:Seems like .optimizer.step")  # torch's copy of an optimizer forgets that a scheduler counts
@pytest.mark.parametrize("config", [None, LORA])
def test_a_copied_model_holds_the_same_gradients_and_takes_the_same_steps(config, build, batch):
    model = build()
    if config:
        model.add_adapter_to_model("one", config)
    model.set_optimizer("AdamW", lr=0.01)
    model.set_lr_scheduler("CosineWarmupScheduler", num_training_steps=4)
    model.forward_backward(inputs=batch(9))
    copied = copy.deepcopy(model)
    for name, parameter in model.state().parameters.items():
        assert torch.equal(copied.state().parameters[name].grad, parameter.grad)
        assert copied.state().parameters[name] is not parameter
    before = {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}
    for _ in range(2):
        assert copied.clip_grad_and_step()
        copied.forward_backward(inputs=batch(7))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.module.named_parameters())
    for _ in range(2):
        assert model.clip_grad_and_step()
        model.forward_backward(inputs=batch(7))
    theirs = dict(copied.module.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in model.module.named_parameters())
    assert copied.state().lr == model.state().lr


def test_a_model_can_be_copied_between_forward_and_backward(build, batch):
    model = build()
    model.forward(inputs=batch(9))
    assert copy.deepcopy(model).state().pending is None
    model.backward()
    assert model.step()


def test_a_mixture_of_experts_runs_in_fp64(build, batch):
    exact, usual = build("qwen3_moe", dtype="float64"), build("qwen3_moe", dtype="float32")
    expected = usual.forward_backward(inputs=batch(9))["loss"]
    assert exact.forward_backward(inputs=batch(9))["loss"] == pytest.approx(expected, rel=1e-5)
    assert exact.clip_grad_and_step()
