"""Numbers and text about the training: `calculate_metric` and `get_train_configs`."""

import inspect
from typing import TYPE_CHECKING, Any

from twinkle_core import session
from twinkle_core.errors import ModelError
from twinkle_core.loss.result import loss_name
from twinkle_core.model.adapter import AdapterState, Window
from twinkle_core.model.optimizers import build_optimizer
from twinkle_core.model.precision import SHORT
from twinkle_core.model.training import next_lr
from twinkle_core.parallel.ranks import DATA_AXES

if TYPE_CHECKING:
    from twinkle_core.model.transformers_model import TransformersModel


def collect_metrics(state: AdapterState, *, is_training: bool) -> dict[str, float]:
    """Return the numbers of what ran since the last call, and begin anew. If nothing ran, the last numbers again."""
    window = state.training if is_training else state.evaluation
    if window.is_empty:
        if is_training not in state.last_metrics:
            what = "`forward_backward`" if is_training else "`forward_only`"
            raise ModelError(f"`calculate_metric(is_training={is_training})`: nothing has run yet. Call {what} first.")
        return dict(state.last_metrics[is_training])
    numbers: dict[str, float] = {}
    if window.count:
        numbers["loss"] = window.loss_sum / window.count
    numbers |= {"num_tokens": window.num_tokens, "tokens_per_s": window.tokens_per_s(), "step": state.step}
    if is_training:
        if state.grad_norm is not None:
            numbers["grad_norm"] = state.grad_norm
        numbers["lr"] = next_lr(state)
        state.training = Window()
    else:
        state.evaluation = Window()
    for metric in state.metrics if is_training else state.eval_metrics:
        sums = metric.state()
        if state.placed is not None:
            sums = dict(zip(sums, state.placed.ranks.sum_numbers(list(sums.values()), *DATA_AXES, "pp"), strict=True))
        numbers |= metric.compute(sums)
        metric.reset()
    state.last_metrics[is_training] = numbers
    return dict(numbers)


def report(state: AdapterState, numbers: dict[str, float], *, is_training: bool, prefix: str) -> None:
    """Hand numbers to the trackers; those of an evaluation are called `eval_...`, those of one adapter of many `name/...`."""
    kind = "" if is_training else "eval_"
    session.current().report_metrics(state.step, {f"{prefix}{kind}{name}": value for name, value in numbers.items()})


def show_progress(state: AdapterState) -> None:
    """Let the progress bar see the numbers so far, without asking the metrics."""
    window = state.training
    numbers = {"step": float(state.step), "tokens_per_s": window.tokens_per_s()}
    if window.count:
        numbers["loss"] = window.loss_sum / window.count
    if state.lr is not None:
        numbers["lr"] = state.lr
    session.current().latest_metrics = numbers


def describe(model: "TransformersModel", state: AdapterState) -> str:
    """Return everything that decides the training, one line each."""
    trained = sum(parameter.numel() for parameter in state.parameters.values())
    total = sum(parameter.numel() for parameter in model.module.parameters())
    processor = state.processor
    lines = [
        ("model", f"{model.model_id} ({type(model.module).__name__})"),
        ("trains", f"LoRA `{state.name}`" if state.is_lora else "all weights"),
        ("parameters", f"{trained:,} trainable of {total:,} ({100 * trained / max(1, total):.2f} %)"),
        ("weights", _dtypes(model, state)),
        ("arithmetic", SHORT[model.precision.arithmetic] + (", loss scaled" if state.scaler else "")),
        ("device", model.device),
        ("optimizer", _optimizer(state)),
        ("clip", f"{state.clip:g} (global L2 norm)"),
        ("scheduler", _scheduler(state)),
        ("loss", "CrossEntropyLoss (token mean); GRPOLoss where `advantages` are given" if state.loss is None
         else loss_name(state.loss)),
        ("accumulation", f"{state.gradient_accumulation_steps} backward pass(es) a step"),
        ("micro-batch", "all rows at once" if processor.micro_batch_size is None else f"{processor.micro_batch_size} rows"),
        ("packing", "on" if processor.packing else "off"),
        ("checkpointing", "on (activations are computed again)" if model.gradient_checkpointing else "off"),
        ("template", "none (features come encoded)" if state.template is None else type(state.template).__name__),
        ("metrics", ", ".join(type(metric).__name__ for metric in state.metrics) or "none added"),
        ("seed", str(session.current().seed)),
        ("mesh", str(model.mesh) if model.mesh else "one device"),
    ]
    if state.is_lora:
        lines.insert(2, ("adapters", ", ".join(_lora(name, config) for name, config in model.lora.configs.items())))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _lora(name: str, config: Any) -> str:
    targets = config.target_modules if isinstance(config.target_modules, str) else "+".join(sorted(config.target_modules or ()))
    return f"{name} (r={config.r}, alpha={config.lora_alpha}, dropout={config.lora_dropout:g}, {targets or 'default layers'})"


def _dtypes(model: "TransformersModel", state: AdapterState) -> str:
    trained = {id(parameter) for parameter in state.parameters.values()}
    kinds: dict[str, set[str]] = {"trained": set(), "frozen": set()}
    for parameter in model.module.parameters():
        kinds["trained" if id(parameter) in trained else "frozen"].add(SHORT.get(parameter.dtype, str(parameter.dtype)))
    return ", ".join(f"{kind} {'/'.join(sorted(dtypes))}" for kind, dtypes in kinds.items() if dtypes)


def _optimizer(state: AdapterState) -> str:
    optimizer = state.optimizer or build_optimizer(None, state.parameters.values(), {}, is_lora=state.is_lora)
    group = dict(optimizer.param_groups[0])
    if state.scheduler is not None:
        now, peak = float(group["lr"]), float(group.get("max_lr", group.get("initial_lr", group["lr"])))
        if now != peak:
            group["lr"] = f"{peak:g}, now {now:g} by {type(state.scheduler).__name__}"
    shown = ", ".join(f"{key}={group[key]}" for key in ("lr", "betas", "momentum", "weight_decay") if key in group)
    more = f", {len(optimizer.param_groups)} parameter groups" if len(optimizer.param_groups) > 1 else ""
    return f"{type(optimizer).__name__}({shown}{more})"


def _scheduler(state: AdapterState) -> str:
    """Return the scheduler with the numbers it was made with."""
    if state.scheduler is None:
        return "none (constant)"
    held = vars(state.scheduler)
    said = ", ".join(f"{name}={held[name]}" for name in inspect.signature(type(state.scheduler)).parameters
                     if name != "last_epoch" and isinstance(held.get(name), int | float | str))
    return f"{type(state.scheduler).__name__}({said})"
