"""From what a script says to a `torch.optim` optimizer or a learning-rate scheduler.

A class, a name, or a function is taken; anything else is an error that lists what is allowed. When the optimizer steps and when
the scheduler advances is the model's business.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from twinkle_core.errors import (
    ArgumentError,
    ArgumentTypeError,
    ModelError,
    TwinkleError,
    UnknownArgumentError,
    UnknownNameError,
    check_finite,
    check_keywords,
    did_you_mean,
    listing,
)
from twinkle_core.model.schedulers import CosineWarmupScheduler, LinearWarmupScheduler

LORA_LR, FULL_LR = 1e-4, 1e-5
ADAMW_DEFAULTS: Mapping[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 0.01}

T = TypeVar("T")

_REFUSED = {
    "LBFGS": "evaluates the loss several times a step, which `forward_backward` and `step` cannot do",
    "SparseAdam": "takes sparse gradients only, which a language model does not have",
}
_NEEDS_METRIC = "ReduceLROnPlateau"
_OWN_SCHEDULERS: Mapping[str, type[LRScheduler]] = {
    "CosineWarmupScheduler": CosineWarmupScheduler, "LinearWarmupScheduler": LinearWarmupScheduler}


def build_optimizer(
    value: Any, parameters: Iterable[torch.nn.Parameter], options: Mapping[str, Any] | None = None, *, is_lora: bool,
) -> Optimizer:
    """Return an optimizer of `parameters`.

    Args:
        value: None (AdamW), a class, a name in `torch.optim`, a function of the list of parameters (and of `options`) that
            returns an optimizer of them, e.g. with parameter groups, or an optimizer of all of them.
        parameters: the trainable ones.
        options: keywords of the class or function. A class that takes `lr` and is not told one gets 1e-4 for a LoRA and 1e-5
            for the full model; AdamW gets betas 0.9 / 0.999 and weight decay 0.01.
        is_lora: whether the parameters are those of an adapter.

    Raises: `ArgumentTypeError`, `UnknownArgumentError`, `UnknownNameError`, `ArgumentError` for a value that the optimizer
        refuses, `ModelError` if there is nothing to train.
    """
    trainable, given = list(parameters), dict(options or {})
    if not trainable:
        raise ModelError("There is no trainable parameter to optimize. Add an adapter, or unfreeze parameters of the model.")
    value = torch.optim.AdamW if value is None else value
    if isinstance(value, str):
        value = _by_name("optimizer", value, _torch_optimizers(), "torch.optim")
    if isinstance(value, type) and issubclass(value, Optimizer):
        _refuse(value)
        _check_options(f"set_optimizer({value.__name__})", value, given)
        if "lr" in inspect.signature(value).parameters:
            given = {"lr": LORA_LR if is_lora else FULL_LR, **given}
        if value is torch.optim.AdamW:
            given = {**ADAMW_DEFAULTS, **given}
        optimizer = _construct("optimizer", value, trainable, given)
        if value.__name__ in _torch_optimizers():
            stand_in = torch.nn.Parameter(torch.ones(2, 2, dtype=trainable[0].dtype, device=trainable[0].device))
            _construct("optimizer", value, [stand_in], given, then=_try_step)
        return optimizer
    if isinstance(value, Optimizer):
        _refuse_options("set_optimizer", given)
        optimizer = value
    elif not callable(value) or isinstance(value, type):
        raise ArgumentTypeError(
            f"`set_optimizer` got {_type_name(value)}. Pass a class of `torch.optim`, its name such as \"AdamW\", a function that "
            "takes the list of parameters and returns an optimizer, or an optimizer of just these parameters.")
    else:
        optimizer = _call_function("set_optimizer", value, trainable, given, Optimizer)
    _refuse(type(optimizer))
    _check_ownership(optimizer, trainable, is_whole=optimizer is value)
    for group in optimizer.param_groups:
        for name, option in group.items():
            check_finite(name, option)
    return optimizer


def build_scheduler(value: Any, optimizer: Optimizer, options: Mapping[str, Any] | None = None) -> LRScheduler:
    """Return a learning-rate scheduler of `optimizer`, advanced by `step()` without arguments.

    Args:
        value: a class, a name in `torch.optim.lr_scheduler`, "CosineWarmupScheduler", "LinearWarmupScheduler", or a function of
            the optimizer (and of `options`) that returns a scheduler of it, or a scheduler of it.
        optimizer: whose learning rates it sets.
        options: keywords of the class or function.

    Raises: as `build_optimizer`.
    """
    given = dict(options or {})
    if isinstance(value, str):
        value = _by_name("scheduler", value, {**_torch_schedulers(), **_OWN_SCHEDULERS}, "torch.optim.lr_scheduler and Twinkle")
    if isinstance(value, type) and issubclass(value, LRScheduler):
        _refuse_plateau(value)
        _check_options(f"set_lr_scheduler({value.__name__})", value, given)
        if not _holds_code(given):
            _construct("scheduler", value, _copy_of(optimizer), given, then=_try_schedule)
        return _construct("scheduler", value, optimizer, given)
    if isinstance(value, LRScheduler):
        _refuse_options("set_lr_scheduler", given)
        scheduler = value
    elif not callable(value) or isinstance(value, type):
        raise ArgumentTypeError(
            f"`set_lr_scheduler` got {_type_name(value)}. Pass a class of `torch.optim.lr_scheduler`, a name such as "
            "\"CosineWarmupScheduler\", a function that takes the optimizer and returns a scheduler, or a scheduler of the "
            "optimizer that is set.")
    else:
        scheduler = _call_function("set_lr_scheduler", value, optimizer, given, LRScheduler)
    _refuse_plateau(type(scheduler))
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ModelError("`set_lr_scheduler` got a scheduler of another optimizer than that which is set. Pass a function: it gets "
                         "the optimizer to build the scheduler from.")
    return scheduler


def check_rates(optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
    """Raise `ModelError` if there is no finite learning rate for the next step."""
    if isinstance(scheduler, lr_scheduler.OneCycleLR) and scheduler.last_epoch >= scheduler.total_steps:
        raise ModelError(f"`OneCycleLR` was set for {scheduler.total_steps} steps, which are taken. Weights and gradients are "
                         "unchanged. Set it with the `total_steps` of the whole run.")
    for index, group in enumerate(optimizer.param_groups):
        if not math.isfinite(rate := float(group.get("lr", 0.0))):
            by = "" if scheduler is None else f", set by `{type(scheduler).__name__}`"
            raise ModelError(f"The learning rate of parameter group {index} is {rate}{by}: the step would ruin the weights. "
                             "Weights and gradients are unchanged. Call `set_optimizer` or `set_lr_scheduler` with other values.")


def optimizer_names() -> list[str]:
    """Return the names that `build_optimizer` takes."""
    return sorted(set(_torch_optimizers()) - set(_REFUSED))


def scheduler_names() -> list[str]:
    """Return the names that `build_scheduler` takes."""
    return sorted({*_torch_schedulers(), *_OWN_SCHEDULERS} - {_NEEDS_METRIC})


def _torch_optimizers() -> dict[str, type[Optimizer]]:
    return _subclasses(vars(torch.optim), Optimizer)


def _torch_schedulers() -> dict[str, type[LRScheduler]]:
    return _subclasses(vars(lr_scheduler), LRScheduler)


def _subclasses(members: Mapping[str, Any], base: type[T]) -> dict[str, type[T]]:
    return {name: member for name, member in members.items()
            if isinstance(member, type) and issubclass(member, base) and member.__name__ not in (base.__name__, "_LRScheduler")}


def _by_name(what: str, name: str, known: Mapping[str, type[T]], where: str) -> type[T]:
    if name in known:
        return known[name]
    usable = optimizer_names() if what == "optimizer" else scheduler_names()
    raise UnknownNameError(f"There is no {what} `{name}` in {where}.{did_you_mean(name, usable)} Names: {listing(usable)}.")


def _check_options(what: str, build: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Hold the keywords against the signature, of which the first parameter is what the object is built of."""
    parameters = list(inspect.signature(build).parameters.values())[1:]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        check_keywords(what, options, [parameter.name for parameter in parameters])
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if missing := [name for name in needed if name not in options]:
        raise ArgumentTypeError(f"`{what}` needs {listing(missing)}. Pass it as a keyword.")


def _construct(
    what: str, build: Callable[..., Any], target: Any, options: Mapping[str, Any], *, then: Callable[[Any], None] = lambda _: None,
) -> Any:
    """Return what `build` makes of `target` after `then` has tried it."""
    for name, option in options.items():
        check_finite(name, option)
    try:
        made = build(target, **options)
        then(made)
    except TwinkleError:
        raise
    except (ValueError, TypeError, ArithmeticError, RuntimeError, LookupError, AttributeError, AssertionError) as error:
        said = ", ".join(f"{name}={option!r}" for name, option in options.items())
        raise ArgumentError(f"The {what} `{build.__name__}({said})` was refused: {_reason(error)}. Change the value, or leave it "
                            "out for the default.") from error
    return made


def _try_step(optimizer: Optimizer) -> None:
    """Take a step of an optimizer of stand-ins: some options fail only there. Raises: `ValueError` if it ruins them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if not all(bool(parameter.isfinite().all()) for parameter in parameters):
        raise ValueError("one step with it gives weights that are not finite")


def _try_schedule(scheduler: LRScheduler) -> None:
    """Advance a scheduler of stand-ins once: some options fail only there."""
    scheduler.optimizer.step()
    scheduler.step()
    for group in scheduler.optimizer.param_groups:
        if not math.isfinite(group["lr"]):
            raise ValueError(f"it gives the learning rate {group['lr']}")


def _copy_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of stand-ins with the same options, for a scheduler to be tried on."""
    groups = [{**{name: copy.deepcopy(option) for name, option in group.items() if name not in ("params", "param_names")},
               "params": [torch.nn.Parameter(torch.zeros(1))]} for group in optimizer.param_groups]
    copied = torch.optim.SGD(groups)
    copied.defaults = {**copied.defaults, **optimizer.defaults}
    return copied


def _holds_code(options: Mapping[str, Any]) -> bool:
    """Whether options hold a user's functions or schedulers, which are not to be called for a trial."""
    values = [entry for option in options.values() for entry in (option if isinstance(option, list | tuple) else [option])]
    return any(callable(value) or isinstance(value, LRScheduler) for value in values)


def _reason(error: Exception) -> str:
    return f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _call_function(where: str, function: Callable[..., Any], target: Any, options: Mapping[str, Any], result: type) -> Any:
    try:
        signature = inspect.signature(function)
        signature.bind(target, **options)
    except TypeError as error:
        raise UnknownArgumentError(f"The function given to `{where}` cannot be called with one argument and the keywords "
                                   f"{listing(options)}: {error}. Change its parameters or the keywords.") from error
    made = function(target, **options)
    if not isinstance(made, result):
        raise ArgumentTypeError(f"The function given to `{where}` returned {type(made).__name__}. Return a "
                                f"`{result.__module__.removesuffix('.optimizer')}.{result.__name__}`.")
    return made


def _check_ownership(optimizer: Optimizer, trainable: Sequence[torch.nn.Parameter], *, is_whole: bool) -> None:
    """Raise `ModelError` for parameters that are not trained here and, if `is_whole`, for trained ones that it lacks."""
    known = {id(parameter) for parameter in trainable}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if foreign := len(held - known):
        raise ModelError(f"`set_optimizer` got an optimizer with {foreign} parameter(s) that this model does not train. Pass a "
                         "function: it gets the parameters to build the optimizer of.")
    if is_whole and (lacking := len(known - held)):
        raise ModelError(f"`set_optimizer` got an optimizer that lacks {lacking} of the {len(known)} parameters trained here. "
                         "Build it of all of them, or freeze the others; a function of the parameters may leave some out.")


def _refuse(optimizer: type) -> None:
    if optimizer.__name__ in _REFUSED:
        raise ArgumentError(f"`{optimizer.__name__}` {_REFUSED[optimizer.__name__]}. Use another optimizer, e.g. `AdamW`.")


def _refuse_options(method: str, options: Mapping[str, Any]) -> None:
    if options:
        raise ArgumentTypeError(f"`{method}` got {listing(options)}, which only a class, a name or a function can take, together "
                                "with an instance. Pass them when you make it.")


def _refuse_plateau(scheduler: type) -> None:
    if scheduler.__name__ == _NEEDS_METRIC:
        raise ArgumentError("`ReduceLROnPlateau` needs a metric at every step, which `lr_step()` does not have. Use a schedule of "
                            "steps such as `CosineWarmupScheduler`.")


def _type_name(value: Any) -> str:
    return f"the class `{value.__name__}`" if isinstance(value, type) else type(value).__name__
