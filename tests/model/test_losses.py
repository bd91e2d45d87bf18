"""Losses: functions, logits, inputs aligned with tokens, and what is refused."""

import re

import pytest
import torch

from twinkle_core.data_format import SampledSequence, SampleResponse
from twinkle_core.errors import DataError, ModelError, NonFiniteLossError, UnknownArgumentError
from twinkle_core.loss.interface import Loss

LENGTHS = (7, 1, 12)


def same_gradients(one, other):
    for (name, a), b in zip(one.module.named_parameters(), other.module.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("packing", [False, True])
def test_a_function_of_logprobs_trains_as_the_default_does(packing, build, batch):
    default, own = build(), build()
    own.set_processor(packing=packing, micro_batch_size=2)
    own.set_loss(lambda outputs, targets: (-outputs.logprobs.sum(), (targets != -100).sum()))
    assert own.forward_backward(inputs=batch(*LENGTHS))["loss"] == pytest.approx(
        default.forward_backward(inputs=batch(*LENGTHS))["loss"])
    same_gradients(own, default)


def test_a_loss_that_asks_for_logits_gets_them_and_that_is_said_once(build, batch):
    class FromLogits(Loss):
        requires_logits = True

        def __call__(self, outputs, targets):
            logits = outputs.logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
            return loss, (targets != -100).sum()

    default, own = build(), build()
    own.set_loss(FromLogits)
    default.forward_backward(inputs=batch(*LENGTHS))
    with pytest.warns(UserWarning, match="`FromLogits` asks for logits, so all of them are held in memory") as caught:
        own.forward_backward(inputs=batch(*LENGTHS))
        own.zero_grad()
        own.forward_backward(inputs=batch(*LENGTHS))
    assert len([w for w in caught if "asks for logits" in str(w.message)]) == 1
    same_gradients(own, default)


def test_a_weight_per_token_in_a_subclass_of_the_default_is_not_ignored(build, batch):
    from twinkle_core.loss.cross_entropy import CrossEntropyLoss

    class LaterCountsMore(CrossEntropyLoss):
        def __call__(self, outputs, targets):
            weight = torch.arange(targets.shape[1], dtype=outputs.logprobs.dtype)
            return -(outputs.logprobs * weight).sum(), (targets != -100).sum()

    inherits, function = build(), build()
    inherits.set_loss(LaterCountsMore())
    function.set_loss(lambda outputs, targets: LaterCountsMore()(outputs, targets))
    for model in (inherits, function):
        model.forward_backward(inputs=batch(*LENGTHS))
    same_gradients(inherits, function)


def test_inputs_reach_the_loss_aligned_with_the_targets(build, batch):
    seen = []

    def loss(outputs, targets, *, advantages, ref_logprobs, beta=0.0):
        seen.append((advantages.tolist(), torch.where(targets != -100, ref_logprobs, 0.0), beta))
        return -(outputs.logprobs * advantages[:, None]).sum(), (targets != -100).sum()

    model = build()
    model.set_loss(loss)
    model.set_processor(micro_batch_size=2)
    features = batch(*LENGTHS)
    per_token = [[float(token) for token in feature["input_ids"]] for feature in features]
    model.forward_backward(inputs=features, advantages=[1, 2, 3], ref_logprobs=per_token, beta=0.5)
    assert [entry[0] for entry in seen] == [[1.0, 2.0], [3.0]]
    assert all(entry[2] == 0.5 for entry in seen)
    expected = [float(max(label, 0)) for label in features[2]["labels"][1:]] + [0.0]  # the position before a token predicts it
    assert seen[1][1][0].tolist() == expected


def test_old_logprobs_of_samples_are_taken_where_the_loss_takes_them(build):
    def sample(prompt, tokens, logprobs):
        feature = {"input_ids": prompt + tokens, "labels": [-100] * len(prompt) + tokens,
                   "old_logprobs": [0.0] * len(prompt) + logprobs}
        return SampledSequence(tokens=tokens, logprobs=logprobs, decoded="", stop_reason="stop", new_input_feature=feature)

    responses = [SampleResponse(sequences=[sample([1, 2], [3, 4], [-0.5, -0.25]), sample([1, 2], [5], [-1.0])]),
                 SampleResponse(sequences=[sample([6], [7, 8], [-2.0, -3.0])])]
    seen = []

    def loss(outputs, targets, *, advantages, old_logprobs):
        seen.append((advantages.tolist(), old_logprobs.tolist()))
        return -outputs.logprobs.sum(), (targets != -100).sum()

    model = build()
    assert model.forward_backward(inputs=responses)["num_tokens"] == 5  # the default loss: trained on as they are
    model.set_loss(loss)
    output = model.forward_backward(inputs=responses, advantages=[1.0, -1.0, 0.5])
    assert seen == [([1.0, -1.0, 0.5], [[0.0, -0.5, -0.25, 0.0], [0.0, -1.0, 0.0, 0.0], [-2.0, -3.0, 0.0, 0.0]])]
    assert [len(row) for row in output["logprobs"]] == [4, 3, 3]
    with pytest.raises(DataError, match=r"`advantages` has 2 entries, `inputs` has 3 sequences"):
        model.forward_backward(inputs=responses, advantages=[1.0, -1.0])


def test_inputs_without_a_loss_that_uses_them_are_an_error_that_lists_losses(build, batch):
    model = build()
    with pytest.raises(ModelError, match=r"No loss that uses `weights` is set.*`set_loss.*losses: .*`CrossEntropyLoss`"):
        model.forward_backward(inputs=batch(6), weights=[1.0])
    assert not model.step()


def test_the_advice_for_inputs_without_a_loss_is_a_function_that_works(build, batch):
    model = build()
    with pytest.raises(ModelError, match=re.escape("a function `(outputs, targets, *, weights)` that returns (sum, count)")):
        model.forward_backward(inputs=batch(6), weights=[1.0])
    model.set_loss(lambda outputs, targets, *, weights: (
        -(outputs.logprobs * weights[:, None]).sum(), (targets != -100).sum()))
    model.forward_backward(inputs=batch(6), weights=[1.0])
    assert model.step()


@pytest.mark.parametrize("loss", [
    None, lambda outputs, targets, *, advantages: (outputs.logprobs.sum(), 1),
    lambda outputs, targets, **inputs: (outputs.logprobs.sum(), 1)], ids=["default", "function", "any"])
@pytest.mark.parametrize("method", ["forward", "forward_only", "forward_backward"])
@pytest.mark.parametrize(("typo", "meant"), [
    ("adapter_nme", "adapter_name"), ("disable_loar", "disable_lora"), ("input", "inputs")])
def test_a_misspelt_argument_is_not_taken_for_an_input_of_the_loss(method, loss, typo, meant, build, batch):
    model = build()
    if loss is not None:
        model.set_loss(loss)
    with pytest.raises(UnknownArgumentError, match=f"no argument `{typo}`. Did you mean `{meant}`"):
        getattr(model, method)(batch(6), **{typo: "x"})


def test_training_with_the_adapter_switched_off_is_refused(build, batch):
    with pytest.raises(UnknownArgumentError, match="`disable_lora` is an argument of `forward_only` alone.*Leave it out"):
        build().forward_backward(batch(6), disable_lora=True)


def test_an_input_of_the_loss_may_be_called_like_an_argument(build, batch):
    model = build()
    model.set_loss(lambda outputs, targets, *, inputs_scale: (outputs.logprobs.sum() * inputs_scale, 1))
    model.forward_backward(inputs=batch(6), inputs_scale=2.0)
    assert model.step()


def test_an_input_that_the_loss_does_not_take_or_misses_is_an_error(build, batch):
    model = build()
    model.set_loss(lambda outputs, targets, *, advantages: (outputs.logprobs.sum(), 1))
    with pytest.raises(ModelError, match="takes no input `advantage`. Did you mean `advantages`"):
        model.forward_backward(inputs=batch(6), advantages=[1.0], advantage=[1.0])
    with pytest.raises(ModelError, match="needs `advantages`, which this call did not get"):
        model.forward_backward(inputs=batch(6))
    model.set_loss("CrossEntropyLoss")
    with pytest.raises(ModelError, match="`CrossEntropyLoss` takes no input `advantages`"):
        model.forward_backward(inputs=batch(6), advantages=[1.0])


def test_forward_only_without_the_losses_inputs_gives_the_token_mean(build, batch):
    model, plain = build(), build()
    model.set_loss(lambda outputs, targets, *, advantages: (outputs.logprobs.sum(), 1))
    assert model.forward_only(inputs=batch(6)) == plain.forward_only(inputs=batch(6))


def test_a_loss_that_returns_no_sum_and_count_is_an_error(build, batch):
    model = build()
    model.set_loss(lambda outputs, targets: outputs.logprobs)
    with pytest.raises(ModelError, match=r"returned a tensor of shape \(1, 6\). Return \(sum, count\)"):
        model.forward_backward(inputs=batch(6))


def test_a_router_loss_that_is_asked_for_but_not_added_is_said(build, batch):
    model = build("qwen3_moe")
    model.apply_patch(lambda module: setattr(module.config, "output_router_logits", True))
    with pytest.warns(UserWarning, match="auxiliary loss of the router is not added"):
        model.forward_backward(inputs=batch(6))


def test_a_nan_loss_names_the_rows_discards_the_gradients_and_leaves_the_weights(build, batch):
    model = build(gradient_accumulation_steps=2)
    before = {name: parameter.clone() for name, parameter in model.module.named_parameters()}
    model.forward_backward(inputs=batch(9))
    model.set_loss(lambda outputs, targets: (outputs.logprobs.sum() * float("nan"), 1))
    with pytest.raises(NonFiniteLossError, match=r"loss at step 1 is nan. Rows of the dataset in this batch: 100, 101\..*uncha"):
        model.forward_backward(inputs=batch(6, 8))
    assert not model.step()
    assert (model.state().micro_steps, model.state().grad_count) == (0, 0.0)
    for name, parameter in model.module.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


def test_a_gradient_that_is_not_finite_stops_the_step_with_the_rows(build, batch):
    model = build()
    before = {name: parameter.clone() for name, parameter in model.module.named_parameters()}
    model.forward_backward(inputs=batch(6, 8))
    model.module.lm_head.weight.grad[0, 0] = float("nan")
    with pytest.raises(NonFiniteLossError, match=r"gradient norm at step 1 is nan.*100, 101.*discarded"):
        model.clip_grad_and_step()
    for name, parameter in model.module.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("inputs", [{"input_ids": [1]}, "text", 3, None])
def test_inputs_that_are_no_list_are_refused(inputs, build):
    with pytest.raises(TypeError, match="Pass a list of features"):
        build().forward_backward(inputs=inputs)


def test_a_conversation_without_a_template_says_what_to_call(build):
    with pytest.raises(ModelError, match=r"inputs\[0\] is a conversation.*`set_template"):
        build().forward_backward(inputs=[{"messages": [{"role": "user", "content": "hi"}]}])


CHAT = {"messages": [
    {"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am a model of a few weights."}]}


def test_conversations_are_encoded_by_the_models_template(ms_cache):
    from twinkle_core.model.transformers_model import TransformersModel
    from twinkle_core.template.template import Template

    model = TransformersModel("ms://Qwen/Qwen3.5-4B", device="cpu")
    model.set_template("Template")
    feature = Template("ms://Qwen/Qwen3.5-4B").batch_encode([CHAT])[0][0]
    assert model.forward_only(inputs=[CHAT, feature])["logprobs"] == model.forward_only(inputs=[feature, feature])["logprobs"]
    model.set_template("Template", max_length=12, truncation_strategy="split")
    with pytest.raises(DataError, match=r"inputs\[0\] became \d+ features: the template's truncation split it.*Dataset.encode"):
        model.forward_only(inputs=[CHAT])


@pytest.mark.parametrize(("change", "text"), [
    ({"input_ids": [5, 99999], "labels": [5, 6]}, r"inputs\[1\] \(row 101\): `input_ids\[1\]` is 99999, .*vocabulary is 0 to 100"),
    ({"input_ids": [5, 6], "labels": [5, -1]}, r"`labels\[1\]` is -1"),
    ({"input_ids": [5] * 129, "labels": [5] * 129}, r"has 129 tokens, but the model has 128 positions"),
])
@pytest.mark.parametrize("method", ["forward", "forward_only", "forward_backward"])
def test_what_the_model_cannot_read_is_an_error_before_the_first_micro_batch_runs(method, change, text, build, batch):
    model = build()
    model.set_processor(micro_batch_size=1)
    model.forward_backward(inputs=batch(9))
    held = [parameter.grad.clone() for parameter in model.module.parameters()]
    ran = []
    model.module.register_forward_pre_hook(lambda *_: ran.append(1))
    features = batch(6, 8)
    features[1] |= change
    with pytest.raises(DataError, match=text):
        getattr(model, method)(inputs=features)
    assert not ran
    for parameter, before in zip(model.module.parameters(), held, strict=True):
        assert torch.equal(parameter.grad, before)
