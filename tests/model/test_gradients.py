"""Gradients are those of a hand-written loop: by family, ragged batches, micro-batches, packing, checkpointing, LoRA."""

import copy

import pytest
import torch

FAMILIES = ["llama", "qwen3", "qwen3_sliding", "qwen3_moe", "qwen3_5", "qwen3_5_vl", "gemma2"]
LENGTHS = (7, 1, 19, 2, 12)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_equal_those_of_each_sequence_run_alone(name, build, reference, batch, run_alone, assert_same_gradients):
    model, module = build(name), reference(name)
    output = model.forward_backward(inputs=batch(*LENGTHS))
    total, count = run_alone(module, batch(*LENGTHS))
    assert output["num_tokens"] == count
    assert output["loss"] == pytest.approx(total / count, rel=2e-6)
    assert_same_gradients(model.module, module)


def test_a_model_that_scales_its_logits_runs_as_a_whole_and_says_so(build, reference, batch, run_alone, assert_same_gradients):
    model, module = build("cohere"), reference("cohere")
    with pytest.warns(UserWarning, match="memory-saving loss is off"):
        model.forward_backward(inputs=batch(*LENGTHS))
    run_alone(module, batch(*LENGTHS))
    assert_same_gradients(model.module, module)


@pytest.mark.parametrize("options", [{"micro_batch_size": 2}, {"micro_batch_size": 1}, {"packing": True},
                                     {"packing": True, "micro_batch_size": 3}])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "qwen3_sliding"])
def test_micro_batches_and_packing_change_no_gradient(name, options, build, reference, batch, run_alone, assert_same_gradients):
    model, module = build(name), reference(name)
    model.set_processor(**options)
    output = model.forward_backward(inputs=batch(*LENGTHS))
    total, count = run_alone(module, batch(*LENGTHS))
    assert output["loss"] == pytest.approx(total / count, rel=2e-6)
    assert_same_gradients(model.module, module)


def test_packed_rows_of_bounded_length_change_no_gradient(build, reference, batch, run_alone, assert_same_gradients):
    model, module = build("qwen3"), reference("qwen3")
    model.set_processor(packing=True)
    model.state().processor.row_cost = 5
    model.forward_backward(inputs=batch(*LENGTHS))
    run_alone(module, batch(*LENGTHS))
    assert_same_gradients(model.module, module)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_gradient_checkpointing_changes_no_gradient(name, build, reference, batch, run_alone, assert_same_gradients):
    model, module = build(name, gradient_checkpointing=True), reference(name)
    model.forward_backward(inputs=batch(*LENGTHS))
    run_alone(module, batch(*LENGTHS))
    assert_same_gradients(model.module, module)


def test_forward_and_backward_in_two_calls_give_the_same_gradients(build, reference, batch, run_alone, assert_same_gradients):
    model, module = build("qwen3"), reference("qwen3")
    model.set_processor(micro_batch_size=2)
    model.forward(inputs=batch(*LENGTHS))
    model.backward()
    run_alone(module, batch(*LENGTHS))
    assert_same_gradients(model.module, module)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_eight_steps_equal_a_hand_written_loop(name, build, reference, batch, run_alone):
    model, module = build(name), reference(name)
    model.set_optimizer("SGD", lr=0.01, momentum=0.9)  # Adam would make a whole step of a gradient that is only noise
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    for step in range(8):
        features = batch(9, 14, 5, seed=step)
        model.forward_backward(inputs=features[:1])
        model.forward_backward(inputs=features[1:])
        assert model.clip_grad_and_step(max_norm=0.5)
        _, count = run_alone(module, features)
        for parameter in module.parameters():
            parameter.grad /= count
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        assert model.state().grad_norm == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    ours = dict(model.module.named_parameters())
    for key, parameter in module.named_parameters():
        torch.testing.assert_close(ours[key], parameter, rtol=1e-5, atol=1e-6, msg=key)


def test_lora_gradients_equal_those_of_a_peft_model(build, reference, batch, run_alone):
    import peft

    model, module = build("qwen3"), reference("qwen3")
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(module, copy.deepcopy(config), adapter_name="one")
    model.add_adapter_to_model("one", config)
    theirs = {key.removeprefix("base_model.model."): value for key, value in wrapped.named_parameters() if value.requires_grad}
    mine = model.state().parameters
    assert set(mine) == set(theirs)
    for key, parameter in theirs.items():
        torch.nn.init.normal_(parameter, std=0.1)
        mine[key].data.copy_(parameter.data)
    model.forward_backward(inputs=batch(*LENGTHS))
    run_alone(wrapped, batch(*LENGTHS))
    for key, parameter in theirs.items():
        torch.testing.assert_close(mine[key].grad.double(), parameter.grad.double(), rtol=1e-5, atol=1e-6, msg=key)


def test_a_lora_on_the_head_trains_through_the_head_module(build, batch):
    model = build("qwen3")
    model.add_adapter_to_model("one", {"r": 2, "target_modules": ["lm_head", "q_proj"]})
    before = model.forward_backward(inputs=batch(9, 12))
    gradients = [p.grad for key, p in model.state().parameters.items() if "lm_head" in key and "lora_B" in key]
    assert gradients[0] is not None and gradients[0].any()
    model.set_optimizer("SGD", lr=0.5)
    model.clip_grad_and_step()
    assert model.forward_only(inputs=batch(9, 12))["loss"] < before["loss"]


def test_logprobs_come_per_sequence_in_input_order_at_the_token_they_speak_about(build, reference, batch):
    model, module = build("qwen3"), reference("qwen3")
    model.set_processor(packing=True, micro_batch_size=3)
    features = batch(*LENGTHS)
    output = model.forward_only(inputs=features)
    for feature, logprobs in zip(features, output["logprobs"], strict=True):
        ids = torch.tensor([feature["input_ids"]])
        expected = torch.log_softmax(module(input_ids=ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        expected = [0.0] + [value if label != -100 else 0.0 for value, label in zip(expected, feature["labels"][1:], strict=True)]
        assert logprobs == pytest.approx(expected, abs=1e-5)


def test_an_empty_batch_has_weight_zero(build):
    model = build("qwen3")
    assert model.forward_backward(inputs=[]) == {"loss": 0.0, "num_tokens": 0, "logprobs": []}
    assert not model.clip_grad_and_step()


def test_inputs_are_not_mutated(build, batch):
    features = batch(*LENGTHS)
    before = copy.deepcopy(features)
    build("qwen3").forward_backward(inputs=features)
    assert features == before
