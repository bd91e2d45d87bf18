"""Changing a module that has run already: adapters and patches that come late, and those that fail half-way."""

import contextlib

import pytest
import torch

from twinkle_core.errors import ArgumentError, ModelError

LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
DROPPING = {**LORA, "lora_dropout": 0.5, "init_lora_weights": False}


def _divide_logits(module):
    original = module.forward

    def forward(*args, **kwargs):
        output = original(*args, **kwargs)
        output.logits = output.logits * 0.1
        return output

    module.forward = forward


def _parts(module):
    return [name for name, _ in module.named_modules()], [(n, p.requires_grad) for n, p in module.named_parameters()]


@pytest.mark.parametrize("first", [None, "one"])
def test_an_adapter_added_after_an_evaluation_has_no_dropout_in_the_next(first, build, batch):
    model = build()
    if first:
        model.add_adapter_to_model(first, LORA)
    model.forward_only(inputs=batch(9))
    model.add_adapter_to_model("late", DROPPING)
    losses = {model.forward_only(inputs=batch(9), adapter_name="late")["loss"] for _ in range(3)}
    assert len(losses) == 1


def test_dropout_stays_off_after_an_adapter_or_a_patch_that_failed(build, batch):
    model = build()
    model.add_adapter_to_model("one", DROPPING)
    expected = model.forward_only(inputs=batch(9))["loss"]
    with contextlib.suppress(ModelError):
        model.add_adapter_to_model("two", {"r": 2, "target_modules": ["nothing"]})
    model.apply_patch(lambda module: module.train() and None)
    assert model.forward_only(inputs=batch(9))["loss"] == expected


@pytest.mark.filterwarnings("ignore:.*memory-saving loss is off")
def test_a_patch_of_the_logits_works_after_the_first_forward_too(build, batch):
    early, late = build(), build()
    before = late.forward_only(inputs=batch(9))["loss"]
    for model in (early, late):
        model.apply_patch(_divide_logits)
    assert late.forward_only(inputs=batch(9))["loss"] == early.forward_only(inputs=batch(9))["loss"] != before


@pytest.mark.parametrize("config", [
    {"r": 2, "target_modules": ["q_proj", "input_layernorm"]},
    {"r": 2, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 0}},
    {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["nope"]},
    {"r": 2, "target_modules": "[("},
])
@pytest.mark.parametrize("first", [None, "one"])
def test_an_adapter_that_cannot_be_added_leaves_nothing_behind(config, first, build, batch):
    model = build()
    if first:
        model.add_adapter_to_model(first, LORA)
    parts, expected = _parts(model.module), model.forward_only(inputs=batch(9))["loss"]
    with pytest.raises(ModelError, match=r"linear layers.*are called.*`q_proj`"):
        model.add_adapter_to_model("bad", config)
    assert _parts(model.module) == parts
    assert model.forward_backward(inputs=batch(9))["loss"] == pytest.approx(expected)
    assert model.clip_grad_and_step()
    model.add_adapter_to_model("bad", LORA)
    assert set(model.lora.configs) == ({"one", "bad"} if first else {"bad"})


def test_a_patch_that_raises_leaves_the_module_as_it_was(build, batch):
    model = build()
    parts, expected = _parts(model.module), model.forward_only(inputs=batch(9))["loss"]

    def patch(module):
        module.requires_grad_(False)
        module.lm_head = torch.nn.Linear(2, 2)
        _divide_logits(module)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        model.apply_patch(patch)
    assert _parts(model.module) == parts
    assert model.forward_only(inputs=batch(9))["loss"] == expected


@pytest.mark.parametrize("name", ["training", "forward", "keys", "items", "state_dict"])
def test_an_adapter_named_like_an_attribute_of_modules_is_refused(name, build):
    with pytest.raises(ArgumentError, match=f"`adapter_name='{name}'` is the name of an attribute.*such as `{name}_1`"):
        build().add_adapter_to_model(name, LORA)


def test_target_modules_that_are_not_there_are_named_where_others_are(build):
    model = build()
    with pytest.warns(UserWarning, match=r"`target_modules` names `W_pack`, but no layer.*`q_proj`"):
        model.add_adapter_to_model("one", {"r": 2, "target_modules": ["q_proj", "W_pack"]})


@pytest.mark.parametrize("option", [{"lora_alpha": float("nan")}, {"alpha_pattern": {"q_proj": float("inf")}}])
def test_a_lora_scale_that_is_not_finite_is_refused(option, build):
    with pytest.raises(ArgumentError, match=r"`LoraConfig\..*_?alpha.*is not finite"):
        build().add_adapter_to_model("one", {**LORA, **option})
