"""Optimizers and schedulers from a class, a name or a function; the warmup schedules against hand numbers."""

import math

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from twinkle_core.errors import ArgumentError, ArgumentTypeError, ModelError, UnknownArgumentError, UnknownNameError
from twinkle_core.model.optimizers import build_optimizer, build_scheduler, optimizer_names, scheduler_names
from twinkle_core.model.schedulers import CosineWarmupScheduler


@pytest.fixture
def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]


def rates(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(("is_lora", "lr"), [(True, 1e-4), (False, 1e-5)])
def test_default_optimizer_is_adamw_with_the_documented_numbers(parameters, is_lora, lr):
    optimizer = build_optimizer(None, parameters, {}, is_lora=is_lora)
    group = optimizer.param_groups[0]
    assert type(optimizer) is torch.optim.AdamW
    assert (group["lr"], group["betas"], group["weight_decay"]) == (lr, (0.9, 0.999), 0.01)
    assert group["params"] == parameters


def test_a_name_a_class_and_a_function_build_the_same_optimizer(parameters):
    made = [build_optimizer(value, parameters, {"lr": 0.5, "momentum": 0.9}, is_lora=False)
            for value in ("SGD", torch.optim.SGD, lambda ps, lr, momentum: torch.optim.SGD(ps, lr=lr, momentum=momentum))]
    assert {(type(o), o.param_groups[0]["lr"], o.param_groups[0]["momentum"]) for o in made} == {(torch.optim.SGD, 0.5, 0.9)}


def test_an_optimizer_that_was_not_told_a_learning_rate_gets_that_of_the_training(parameters):
    assert build_optimizer("SGD", parameters, {}, is_lora=True).param_groups[0]["lr"] == 1e-4


def test_a_function_may_make_parameter_groups(parameters):
    def groups(ps):
        return torch.optim.AdamW([{"params": ps[:1], "lr": 0.1}, {"params": ps[1:], "lr": 0.2}])

    assert [g["lr"] for g in build_optimizer(groups, parameters, {}, is_lora=False).param_groups] == [0.1, 0.2]


@pytest.mark.parametrize("name", optimizer_names())
def test_every_listed_optimizer_can_be_built(name):
    matrices = [torch.nn.Parameter(torch.ones(2, 2))]  # Muon takes matrices only
    assert isinstance(build_optimizer(name, matrices, {}, is_lora=False), torch.optim.Optimizer)


@pytest.mark.parametrize(("value", "options", "error", "text"), [
    ("Adamw", {}, UnknownNameError, r"no optimizer `Adamw`.*Did you mean `AdamW`"),
    ("AdamW", {"lrr": 1}, UnknownArgumentError, r"`set_optimizer\(AdamW\)` has no argument `lrr`. Did you mean `lr`"),
    ("AdamW", {"lr": -1}, ArgumentError, r"AdamW\(.*lr=-1.*refused: Invalid learning rate: -1. Change the value"),
    ("AdamW", {"lr": "1e-4"}, ArgumentError, r"lr='1e-4'.*was refused"),
    ("AdamW", {"betas": (2, 0.9)}, ArgumentError, r"betas=\(2, 0.9\).*was refused: Invalid beta"),
    ("LBFGS", {}, ArgumentError, r"`LBFGS` evaluates the loss several times a step.*e.g. `AdamW`"),
    (3, {}, ArgumentTypeError, r"`set_optimizer` got int. Pass a class of `torch.optim`, its name such as \"AdamW\", a func"),
    (int, {}, ArgumentTypeError, r"`set_optimizer` got the class `int`"),
    (lambda ps: 3, {}, ArgumentTypeError, r"returned int. Return a `torch.optim.*Optimizer`"),
    (lambda ps: None, {"x": 1}, UnknownArgumentError, r"cannot be called with one argument and the keywords `x`"),
])
def test_a_wrong_optimizer_is_an_error_with_advice(parameters, value, options, error, text):
    with pytest.raises(error, match=text):
        build_optimizer(value, parameters, options, is_lora=False)


def test_an_optimizer_of_other_parameters_is_an_error(parameters):
    foreign = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ModelError, match=r"1 parameter\(s\) that this model does not train. Pass a function: it gets"):
        build_optimizer(lambda ps: torch.optim.SGD([*ps, foreign], lr=0.1), parameters, {}, is_lora=False)


def test_no_trainable_parameter_is_an_error():
    with pytest.raises(ModelError, match="no trainable parameter.*Add an adapter"):
        build_optimizer(None, [], {}, is_lora=False)


def test_cosine_warmup_gives_the_hand_computed_rate_at_every_step(parameters):
    # W = 2, T = 6, m = 0.1, base 1: cos(pi * p) at p = 0, 1/4, 1/2, 3/4, 1 is 1, r, 0, -r, -1 with r = sqrt(1/2)
    optimizer = build_optimizer("SGD", parameters, {"lr": 1.0}, is_lora=False)
    scheduler = build_scheduler("CosineWarmupScheduler", optimizer,
                                {"num_training_steps": 6, "num_warmup_steps": 2, "min_lr_ratio": 0.1})
    r = math.sqrt(0.5)
    expected = [0.0, 0.5, 1.0, 0.1 + 0.9 * (1 + r) / 2, 0.55, 0.1 + 0.9 * (1 - r) / 2, 0.1, 0.1]
    assert rates(scheduler, 8) == pytest.approx(expected, abs=1e-12)


def test_linear_warmup_gives_the_hand_computed_rate_at_every_step(parameters):
    optimizer = build_optimizer("SGD", parameters, {"lr": 2.0}, is_lora=False)
    scheduler = build_scheduler("LinearWarmupScheduler", optimizer,
                                {"num_training_steps": 7, "num_warmup_steps": 3, "min_lr_ratio": 0.2})
    assert rates(scheduler, 9) == pytest.approx([0, 2 / 3, 4 / 3, 2, 1.6, 1.2, 0.8, 0.4, 0.4], abs=1e-12)


def test_warmup_without_warmup_steps_begins_at_the_peak(parameters):
    optimizer = build_optimizer("SGD", parameters, {"lr": 1.0}, is_lora=False)
    assert rates(build_scheduler("LinearWarmupScheduler", optimizer, {"num_training_steps": 2}), 3) == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(("name", "reference"), [
    ("CosineWarmupScheduler", get_cosine_schedule_with_warmup), ("LinearWarmupScheduler", get_linear_schedule_with_warmup)])
def test_warmup_schedules_equal_those_of_transformers_up_to_the_last_step(parameters, name, reference):
    ours = build_optimizer("SGD", parameters, {"lr": 0.3}, is_lora=False)
    theirs = build_optimizer("SGD", parameters, {"lr": 0.3}, is_lora=False)
    scheduler = build_scheduler(name, ours, {"num_training_steps": 23, "num_warmup_steps": 5})
    expected = rates(reference(theirs, num_warmup_steps=5, num_training_steps=23), 24)
    assert rates(scheduler, 24) == pytest.approx(expected, abs=1e-15)


def test_each_parameter_group_is_scaled_from_its_own_rate(parameters):
    optimizer = torch.optim.SGD([{"params": parameters[:1], "lr": 1.0}, {"params": parameters[1:], "lr": 0.1}])
    scheduler = CosineWarmupScheduler(optimizer, num_training_steps=4, num_warmup_steps=2)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]


def test_a_scheduler_is_built_from_a_class_and_from_a_function(parameters):
    optimizer = build_optimizer("SGD", parameters, {"lr": 1.0}, is_lora=False)
    for value, options in ((torch.optim.lr_scheduler.StepLR, {"step_size": 2}),
                           (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5), {})):
        assert build_scheduler(value, optimizer, options).optimizer is optimizer


def test_scheduler_names_leave_out_what_needs_a_metric():
    assert {"CosineWarmupScheduler", "LinearWarmupScheduler", "StepLR"} < set(scheduler_names())
    assert "ReduceLROnPlateau" not in scheduler_names()


@pytest.mark.parametrize(("value", "options", "error", "text"), [
    ("CosineWarmup", {}, UnknownNameError, r"no scheduler `CosineWarmup`.*Did you mean `CosineWarmupScheduler`"),
    ("CosineWarmupScheduler", {}, ArgumentTypeError, r"`set_lr_scheduler\(CosineWarmupScheduler\)` needs `num_training_steps`"),
    ("CosineWarmupScheduler", {"num_training_step": 9}, UnknownArgumentError, r"Did you mean `num_training_steps`"),
    ("CosineWarmupScheduler", {"num_training_steps": 0}, ArgumentError, r"`num_training_steps=0`: use an integer >= 1"),
    ("CosineWarmupScheduler", {"num_training_steps": 4, "num_warmup_steps": 5}, ArgumentError, r"never reach its.*fewer"),
    ("LinearWarmupScheduler", {"num_training_steps": 4, "min_lr_ratio": 2}, ArgumentError, r"`min_lr_ratio=2`: use a number"),
    ("LinearWarmupScheduler", {"num_training_steps": 4.5}, ArgumentError, r"`num_training_steps=4.5`: use an integer"),
    ("ReduceLROnPlateau", {}, ArgumentError, r"`ReduceLROnPlateau` needs a metric.*such as `CosineWarmupScheduler`"),
    (None, {}, ArgumentTypeError, r"`set_lr_scheduler` got NoneType. Pass a class of `torch.optim.lr_scheduler`"),
])
def test_a_wrong_scheduler_is_an_error_with_advice(parameters, value, options, error, text):
    with pytest.raises(error, match=text):
        build_scheduler(value, build_optimizer("SGD", parameters, {}, is_lora=False), options)


def test_a_scheduler_of_another_optimizer_is_an_error(parameters):
    one, other = (build_optimizer("SGD", parameters, {}, is_lora=False) for _ in range(2))
    with pytest.raises(ModelError, match="scheduler of another optimizer than that which is set. Pass a function"):
        build_scheduler(lambda o: torch.optim.lr_scheduler.StepLR(other, 1), one, {})


def test_an_optimizer_of_just_these_parameters_is_taken_as_it_is(parameters):
    made = torch.optim.SGD([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.2}])
    assert build_optimizer(made, parameters, {}, is_lora=False) is made


@pytest.mark.parametrize(("choose", "options", "error", "text"), [
    (lambda ps: torch.optim.SGD(ps, lr=0.1), {"lr": 0.2}, ArgumentTypeError, "got `lr`, which only a class.*with an instance"),
    (lambda ps: torch.optim.SGD(ps[:1], lr=0.1), {}, ModelError, "lacks 1 of the 2 parameters trained here. Build it of all"),
    (lambda ps: torch.optim.SGD([*ps, torch.nn.Parameter(torch.ones(1))], lr=0.1), {}, ModelError, r"1 parameter\(s\) that this"),
    (lambda ps: torch.optim.LBFGS(ps), {}, ArgumentError, "`LBFGS` evaluates the loss several times"),
])
def test_an_optimizer_that_is_not_of_just_these_parameters_is_an_error(parameters, choose, options, error, text):
    with pytest.raises(error, match=text):
        build_optimizer(choose(parameters), parameters, options, is_lora=False)


def test_a_function_that_returns_a_refused_optimizer_is_refused(parameters):
    with pytest.raises(ArgumentError, match="`LBFGS` evaluates the loss several times"):
        build_optimizer(lambda ps: torch.optim.LBFGS(ps), parameters, {}, is_lora=False)


def test_a_scheduler_of_the_optimizer_is_taken_as_it_is(parameters):
    one, other = (build_optimizer("SGD", parameters, {}, is_lora=False) for _ in range(2))
    made = torch.optim.lr_scheduler.StepLR(one, 1)
    assert build_scheduler(made, one, {}) is made
    with pytest.raises(ModelError, match="scheduler of another optimizer than that which is set. Pass a function"):
        build_scheduler(made, other, {})
    with pytest.raises(ArgumentTypeError, match="got `step_size`, which only a class"):
        build_scheduler(made, one, {"step_size": 2})
    with pytest.raises(ArgumentError, match="`ReduceLROnPlateau` needs a metric"):
        build_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(one), one, {})


@pytest.mark.parametrize(("build", "refused"), [
    (lambda ps: build_optimizer("Adma", ps, {}, is_lora=False), "LBFGS"),
    (lambda ps: build_scheduler("StepL", build_optimizer("SGD", ps, {}, is_lora=False), {}), "ReduceLROnPlateau")])
def test_names_that_are_refused_are_not_offered(parameters, build, refused):
    with pytest.raises(UnknownNameError, match="Names: ") as caught:
        build(parameters)
    assert refused not in str(caught.value)


def test_a_model_trains_with_instances(build, batch):
    model = build()
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.5)
    model.set_optimizer(optimizer)
    model.set_lr_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    model.forward_backward(inputs=batch(9))
    assert model.clip_grad_and_step()
    assert optimizer.param_groups[0]["lr"] == 0.25
