"""What would ruin the weights is an error, and the weights stay: gradients, losses, learning rates and dtypes."""

import pytest
import torch

from twinkle_core.errors import ArgumentError, ModelError, NonFiniteLossError, UnknownNameError
from twinkle_core.model.optimizers import optimizer_names

NAN, INF = float("nan"), float("inf")
LORA = {"r": 2, "target_modules": ["q_proj"]}


def _weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}


def _assert_kept(model, before):
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.module.named_parameters())


def _count(targets):
    return (targets != -100).sum()


def test_gradients_that_are_not_finite_are_refused_without_a_clip_too(build, batch):
    model = build()
    before = _weights(model)
    model.set_loss(lambda outputs, targets: ((outputs.logprobs * 0).sum().sqrt() - outputs.logprobs.sum(), _count(targets)))
    model.forward_backward(inputs=batch(9))
    with pytest.raises(NonFiniteLossError, match=r"gradient norm at step 1 is nan.*weights unchanged"):
        model.step()
    _assert_kept(model, before)
    model.set_loss("CrossEntropyLoss")
    model.forward_backward(inputs=batch(9))
    assert model.step()


@pytest.mark.parametrize(("count", "text"), [
    (NAN, "returned the count nan, by which"), (INF, "returned the count inf"), (-5, "returned the count -5.0"),
    (torch.tensor(-1), "count -1.0"), (torch.ones(3), r"a tensor of shape \(3,\) as its count"),
    (None, "returned None as its count"),
    ("3", "returned a str as its count"), (torch.tensor(1j), "as its count"), ([3], "returned a list as its count"),
])
def test_a_loss_whose_count_is_no_count_is_an_error(count, text, build, batch):
    model = build()
    model.set_loss(lambda outputs, targets: (-outputs.logprobs.sum(), count))
    for run in (model.forward_backward, model.forward, model.forward_only):
        with pytest.raises(ModelError, match=rf"`<lambda>` .*{text}.*`\(targets != -100\).sum\(\)`"):
            run(inputs=batch(9))
    assert not model.step()


@pytest.mark.parametrize(("change", "text"), [
    (lambda value: value.detach(), "without a gradient.*without `.detach"),
    (lambda value: torch.tensor(value.item()), "without a gradient"),
    (lambda value: value.long(), "sum of dtype torch.int64"),
    (lambda value: value.to(torch.complex128), "sum of dtype torch.complex128.*real floating number"),
])
def test_a_loss_that_cannot_be_trained_with_is_an_error(change, text, build, batch):
    model = build()
    model.set_loss(lambda outputs, targets: (change(-outputs.logprobs.sum()), _count(targets)))
    with pytest.raises(ModelError, match=f"`<lambda>` returned a {text}|`<lambda>` returned a sum {text}"):
        model.forward_backward(inputs=batch(9))


@pytest.mark.parametrize(("name", "options"), [
    ("AdamW", {"lr": INF}), ("AdamW", {"lr": NAN}), ("AdamW", {"weight_decay": INF}), ("AdamW", {"eps": NAN}),
    ("AdamW", {"eps": INF}), ("SGD", {"momentum": NAN}), ("SGD", {"lr": 0.1, "dampening": INF}), ("Adam", {"betas": (0.9, NAN)}),
])
def test_options_of_an_optimizer_that_are_not_finite_are_refused(name, options, build):
    with pytest.raises(ArgumentError, match=r"is not finite.*Use a finite number|Invalid"):
        build().set_optimizer(name, **options)


def test_an_optimizer_of_a_function_is_held_to_finite_options_too(build):
    with pytest.raises(ArgumentError, match=r"`weight_decay=inf` is not finite"):
        build().set_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=INF))


@pytest.mark.parametrize(("name", "options", "text"), [
    ("AdamW", {"betas": (0.9,)}, r"betas=\(0.9,\).*was refused: IndexError"),
    ("AdamW", {"betas": (0.9, 0.99, 0.999)}, "was refused.*too many values"),
    ("SGD", {"lr": 1e30, "weight_decay": 1e30}, "weights that are not finite"),
    ("SparseAdam", {}, "`SparseAdam` takes sparse gradients only.*e.g. `AdamW`"),
])
def test_an_optimizer_that_would_fail_at_its_first_step_is_refused_when_set(name, options, text, build):
    with pytest.raises(ArgumentError, match=text):
        build(dtype=None).set_optimizer(name, **options)


def test_optimizer_names_are_those_that_can_be_set(build):
    assert not {"SparseAdam", "LBFGS"} & set(optimizer_names())
    with pytest.raises(UnknownNameError):
        build().set_optimizer("Sparse")


@pytest.mark.parametrize(("name", "options"), [
    ("StepLR", {"step_size": 1, "gamma": NAN}), ("ExponentialLR", {"gamma": INF}), ("StepLR", {"step_size": 0}),
    ("CosineAnnealingLR", {"T_max": 0}), ("CosineAnnealingLR", {"T_max": 5, "eta_min": NAN}),
])
def test_a_scheduler_that_would_fail_at_the_first_step_is_refused_when_set(name, options, build):
    model = build()
    with pytest.raises(ArgumentError, match=r"is not finite|scheduler `.*was refused: ZeroDivisionError"):
        model.set_lr_scheduler(name, **options)
    assert model.state().scheduler is None


@pytest.mark.parametrize(("name", "options"), [
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": 4}), ("StepLR", {"step_size": 2}), ("CyclicLR", {"base_lr": 0.1, "max_lr": 1.0}),
    ("CosineAnnealingWarmRestarts", {"T_0": 1}), ("CosineWarmupScheduler", {"num_training_steps": 3, "num_warmup_steps": 1}),
])
def test_trying_a_scheduler_leaves_the_optimizer_as_the_scheduler_alone_does(name, options, build):
    model = build()
    model.set_optimizer("SGD", lr=0.5, momentum=0.9)
    model.set_lr_scheduler(name, **options)
    expected = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)
    kinds = {**vars(torch.optim.lr_scheduler)}
    if name in kinds:
        kinds[name](expected, **options)
        plain = {key: value for key, value in expected.param_groups[0].items() if key != "params"}
        assert {key: value for key, value in model.state().optimizer.param_groups[0].items() if key != "params"} == plain
    assert model.state().scheduler.last_epoch == 0


def test_a_learning_rate_that_is_not_finite_is_an_error_before_the_step_and_nothing_is_lost(build, batch):
    model = build()
    model.set_optimizer("SGD", lr=0.1)
    model.set_lr_scheduler("LambdaLR", lr_lambda=lambda step: NAN if step else 1.0)
    model.forward_backward(inputs=batch(9))
    assert model.clip_grad_and_step()
    before = _weights(model)
    model.forward_backward(inputs=batch(9))
    with pytest.raises(ModelError, match=r"learning rate of parameter group 0 is nan, set by `LambdaLR`.*unchanged"):
        model.clip_grad_and_step()
    _assert_kept(model, before)
    model.set_optimizer("SGD", lr=0.1)
    assert model.clip_grad_and_step()


def test_one_cycle_past_its_steps_is_an_error_before_the_step(build, batch):
    model = build()
    model.set_optimizer("SGD", lr=0.1, momentum=0.9)
    model.set_lr_scheduler("OneCycleLR", max_lr=0.1, total_steps=2)
    for _ in range(2):
        model.forward_backward(inputs=batch(9))
        assert model.clip_grad_and_step()
    before = _weights(model)
    model.forward_backward(inputs=batch(9))
    with pytest.raises(ModelError, match=r"`OneCycleLR` was set for 2 steps, which are taken.*`total_steps` of the whole run"):
        model.clip_grad_and_step()
    _assert_kept(model, before)
    assert model.state().step == 2


def test_a_scheduler_that_raises_is_an_error_that_says_that_the_weights_took_the_step(build, batch):
    model = build()
    model.set_lr_scheduler("LambdaLR", lr_lambda=lambda step: [1.0, 0.5][step])
    model.forward_backward(inputs=batch(9))
    assert model.clip_grad_and_step()
    model.forward_backward(inputs=batch(9))
    with pytest.raises(ModelError, match=r"`LambdaLR` has no learning rate after step 2: IndexError.*took that step"):
        model.clip_grad_and_step()
    assert not model.lr_step()


def test_float16_weights_are_not_trained_but_carry_a_lora_and_are_evaluated(build, batch):
    model = build(dtype="float16")
    assert model.forward_only(inputs=batch(9))["loss"] > 0
    before = _weights(model)
    for run in (lambda: model.forward_backward(inputs=batch(9)), lambda: model.forward(inputs=batch(9)),
                lambda: model.set_optimizer("AdamW")):
        with pytest.raises(ModelError, match=r"weights to train are float16.*`mixed_precision=\"fp16\"`, or add a LoRA"):
            run()
    _assert_kept(model, before)
    model.add_adapter_to_model("one", LORA)
    model.forward_backward(inputs=batch(9))
    model.clip_grad_and_step()


@pytest.mark.parametrize("name", optimizer_names())
def test_every_optimizer_takes_a_scheduler(name, build):
    model = build()
    model.set_optimizer(lambda parameters: getattr(torch.optim, name)([p for p in parameters if p.ndim == 2]))
    model.set_lr_scheduler("CosineWarmupScheduler", num_training_steps=5)
    assert model.state().scheduler.last_epoch == 0
