"""Several adapters in one model: whose state is whose, and what is refused."""

import pytest
import torch

from twinkle_core.errors import ArgumentError, ArgumentTypeError, ModelError, UnknownArgumentError
from twinkle_core.loss.cross_entropy import CrossEntropyLoss

LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"]}


def test_names_that_are_prefixes_of_each_other_never_share_an_optimizer(build, batch):
    model = build()
    names = ("lora_1", "lora_10", "lora", "default", "default2", "weight", "layers")
    for name in names:
        model.add_adapter_to_model(name, LORA)
    owned = {name: {id(p) for p in model.state(name).parameters.values()} for name in names}
    assert all(len(ids) == 8 for ids in owned.values())  # A and B of 2 layers x 2 matrices
    assert len(set().union(*owned.values())) == 8 * len(names)
    before = {name: [p.clone() for p in model.state(name).parameters.values()] for name in names}
    model.forward_backward(inputs=batch(9), adapter_name="lora_1")
    assert model.clip_grad_and_step(adapter_name="lora_1")
    for name in names:
        changed = any(not torch.equal(one, other) for one, other in
                      zip(before[name], model.state(name).parameters.values(), strict=True))
        assert changed is (name == "lora_1"), name


def test_gradients_of_two_adapters_may_accumulate_in_turn(build, batch):
    turns, apart = build(), build()
    for model in (turns, apart):
        for name in ("one", "two"):
            model.add_adapter_to_model(name, LORA)
            model.set_optimizer("SGD", lr=1.0, adapter_name=name)
    for name in ("one", "two", "one"):
        turns.forward_backward(inputs=batch(9, seed=len(name)), adapter_name=name)
    turns.clip_grad_and_step(adapter_name="two")
    turns.clip_grad_and_step(adapter_name="one")
    for name, times in (("one", 2), ("two", 1)):
        for _ in range(times):
            apart.forward_backward(inputs=batch(9, seed=len(name)), adapter_name=name)
        apart.clip_grad_and_step(adapter_name=name)
    for name in ("one", "two"):
        for key, parameter in apart.state(name).parameters.items():
            assert torch.equal(turns.state(name).parameters[key], parameter), key


def test_the_only_adapter_needs_no_name(build, batch):
    model = build()
    model.add_adapter_to_model("one", LORA)
    model.forward_backward(inputs=batch(9))
    assert model.clip_grad_and_step()
    assert model.state("one").step == 1


def test_leaving_out_the_name_with_several_adapters_is_an_error_that_lists_them(build, batch):
    model = build()
    model.add_adapter_to_model("one", LORA)
    model.add_adapter_to_model("two", LORA)
    for call in (lambda: model.forward_backward(inputs=batch(9)), model.step, model.zero_grad, model.lr_step,
                 lambda: model.set_loss("CrossEntropyLoss"), lambda: model.calculate_metric(is_training=True)):
        with pytest.raises(ModelError, match="several adapters: `one`, `two`. Say which one with `adapter_name=`"):
            call()


def test_an_unknown_adapter_is_an_error_with_near_matches(build):
    model = build()
    model.add_adapter_to_model("english", LORA)
    with pytest.raises(ArgumentError, match=r"no such adapter. Did you mean `english`\? Adapters: `english`"):
        model.step(adapter_name="englsh")
    with pytest.raises(ArgumentError, match="no such adapter. Adapters: none. Add one"):
        build().step(adapter_name="one")


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "1", "a b"])
def test_a_name_that_cannot_be_part_of_a_parameters_name_is_refused(name, build):
    with pytest.raises(ArgumentError, match="use letters, digits"):
        build().add_adapter_to_model(name, LORA)


def test_a_name_can_be_taken_once(build):
    model = build()
    model.add_adapter_to_model("one", LORA)
    with pytest.raises(ArgumentError, match="has an adapter `one` already"):
        model.add_adapter_to_model("one", LORA)


def test_a_bad_config_is_refused_and_leaves_the_model_as_it_was(build, batch):
    model = build()
    expected = model.forward_only(inputs=batch(9))["loss"]
    with pytest.raises(UnknownArgumentError, match="`LoraConfig` has no argument `rank`"):
        model.add_adapter_to_model("one", {"rank": 2})
    with pytest.raises(ArgumentTypeError, match="of type `int`. Pass a peft `LoraConfig`, or a dict"):
        model.add_adapter_to_model("one", 8)
    with pytest.raises(ModelError, match=r"`one` cannot be added.*linear layers of this model are called.*`q_proj`"):
        model.add_adapter_to_model("one", {"r": 2, "target_modules": ["query_proj"]})
    assert model.forward_only(inputs=batch(9))["loss"] == expected
    assert model.forward_backward(inputs=batch(9))["loss"] == pytest.approx(expected)
    assert model.clip_grad_and_step()
    model.add_adapter_to_model("one", LORA)


def test_the_users_config_object_is_not_changed_and_may_serve_two_adapters(build):
    from peft import LoraConfig

    config = LoraConfig(r=2, target_modules=["q_proj"])
    before = config.to_dict()
    model = build()
    model.add_adapter_to_model("one", config)
    model.add_adapter_to_model("two", config)
    assert config.to_dict() == before


def test_first_weights_depend_on_the_seed_only(build, batch):
    one, other = build(), build()
    torch.rand(5)
    one.add_adapter_to_model("a", LORA)
    torch.rand(7)
    state = torch.get_rng_state()
    other.add_adapter_to_model("a", LORA)
    assert torch.equal(torch.get_rng_state(), state)
    for key, parameter in one.state().parameters.items():
        assert torch.equal(parameter, other.state().parameters[key])


def test_disable_lora_runs_the_base_model_and_training_goes_on_after_it(build, batch):
    model = build()
    base = model.forward_only(inputs=batch(9))["loss"]
    model.add_adapter_to_model("one", LORA)
    model.set_optimizer("SGD", lr=1.0)
    model.forward_backward(inputs=batch(9))
    model.clip_grad_and_step()
    trained = model.forward_only(inputs=batch(9))["loss"]
    assert model.forward_only(inputs=batch(9), disable_lora=True)["loss"] == pytest.approx(base)
    assert trained != pytest.approx(base, rel=1e-4)
    assert model.forward_only(inputs=batch(9))["loss"] == trained
    model.forward_backward(inputs=batch(9))
    assert model.clip_grad_and_step()


def test_a_pass_of_the_base_model_counts_for_no_metric_of_the_adapter(build, batch):
    model = build()
    model.add_metric("Accuracy")
    model.add_adapter_to_model("one", LORA)
    model.forward_only(inputs=batch(9), disable_lora=True)
    with pytest.raises(ModelError, match="nothing has run yet"):
        model.calculate_metric(is_training=False)
    model.forward_only(inputs=batch(12))
    found = model.calculate_metric(is_training=False)
    model.forward_only(inputs=batch(12))
    model.forward_only(inputs=batch(9), disable_lora=True)
    again = model.calculate_metric(is_training=False)
    assert {**again, "tokens_per_s": 0} == {**found, "tokens_per_s": 0}
    assert "accuracy" in found


def test_a_model_trained_as_a_whole_is_not_its_own_reference(build, batch):
    with pytest.raises(ModelError, match="has no adapter.*Load a second `TransformersModel` as the reference, or train a LoRA"):
        build().forward_only(inputs=batch(9), disable_lora=True)


def test_what_was_set_for_the_whole_model_is_where_an_adapter_starts_from(build, batch):
    model = build()
    model.set_loss(CrossEntropyLoss)
    model.set_processor(micro_batch_size=1)
    model.add_metric("Accuracy")
    model.add_adapter_to_model("one", LORA)
    state = model.state("one")
    assert isinstance(state.loss, CrossEntropyLoss)
    assert state.processor.micro_batch_size == 1
    model.forward_backward(inputs=batch(9))
    assert "accuracy" in model.calculate_metric(is_training=True)


def test_an_optimizer_for_the_whole_model_before_an_adapter_is_an_error(build):
    model = build()
    model.set_optimizer("SGD", lr=1.0)
    with pytest.raises(ModelError, match="Call `set_optimizer` after `add_adapter_to_model`"):
        model.add_adapter_to_model("one", LORA)


def test_the_default_learning_rate_is_that_of_lora_or_of_the_whole_model(build):
    whole, adapter = build(), build()
    adapter.add_adapter_to_model("one", LORA)
    assert "AdamW(lr=1e-05, betas=(0.9, 0.999), weight_decay=0.01)" in whole.get_train_configs()
    text = adapter.get_train_configs()
    assert "AdamW(lr=0.0001" in text
    assert "one (r=2, alpha=8, dropout=0, down_proj+q_proj)" in text
    assert "LoRA `one`" in text
