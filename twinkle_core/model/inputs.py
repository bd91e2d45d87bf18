"""What a script passes to `forward_backward`, made ready: features of whatever was given, and the inputs that the loss takes."""

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from twinkle_core import registry
from twinkle_core.data_format import flatten_responses
from twinkle_core.errors import (
    ArgumentError,
    ArgumentTypeError,
    DataError,
    ModelError,
    UnknownArgumentError,
    check_count,
    did_you_mean,
    listing,
)
from twinkle_core.loss.cross_entropy import CrossEntropyLoss
from twinkle_core.loss.grpo import GRPOLoss
from twinkle_core.loss.interface import FunctionLoss, Loss, LossForMetrics
from twinkle_core.loss.result import loss_name
from twinkle_core.mesh import DeviceMesh
from twinkle_core.model.adapter import AdapterState

_DEFAULT_LOSS = CrossEntropyLoss()
_DEFAULT_POLICY_LOSS = GRPOLoss()
_ARGUMENTS = ("inputs", "adapter_name", "disable_lora", "top_logprobs")
"""Of the methods whose other keywords go to the loss."""


def features_of(inputs: Any, state: AdapterState) -> list[Any]:
    """Return one feature a sequence: `inputs` may hold features, conversations (with a template) and `SampleResponse`s."""
    if isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Sequence):
        raise ArgumentTypeError(f"`inputs` is a {type(inputs).__name__}. Pass a list of features (as a `DataLoader` gives them), "
                                "of conversations, or of `SampleResponse`s.")
    items = flatten_responses(inputs)
    places = [index for index, item in enumerate(items) if isinstance(item, Mapping) and "messages" in item]
    if not places:
        return items
    if state.template is None:
        raise ModelError(f"inputs[{places[0]}] is a conversation, and the model has no template to tokenise it. Call "
                         "`set_template(...)`, or encode the rows first: `dataset.encode()`.")
    for place, features in zip(places, state.template.batch_encode([items[place] for place in places]), strict=True):
        if len(features) != 1:
            raise DataError(f"inputs[{place}] became {len(features)} features: the template's truncation "
                            f"{'split' if features else 'dropped'} it. Here each input is one sequence; use "
                            "`truncation_strategy=\"left\"` or `\"right\"`, or encode it before with `Dataset.encode()`.")
        items[place] = features[0]
    return items


def check_top_logprobs(count: object, config: Any, mesh: DeviceMesh | None) -> None:
    """Raise unless a model can give so many of the likeliest tokens in each place."""
    check_count("top_logprobs", count, least=0)
    size = config.get_text_config().vocab_size
    if count > size:  # type: ignore[operator]
        raise ArgumentError(f"`top_logprobs={count}`: the model has {size} tokens. Use at most so many.")
    if count and mesh is not None and mesh.pp > 1:
        raise ModelError("`top_logprobs` is not built for pipeline stages. Use a mesh without `pp` for this model.")


def choose_loss(
    state: AdapterState, given: Mapping[str, Any], features: Sequence[Any], *, training: bool,
) -> tuple[Loss, dict[str, Any]]:
    """Return the loss to use and its inputs; the sampler's log-probabilities are taken from the features where it takes them.

    With no loss set, that is token-mean cross entropy, or GRPO's where `advantages` are given. Without gradients a loss whose
    inputs were not given gives way to token-mean cross entropy: the call is about log-probabilities. What only an added metric
    takes is carried to it past the loss.

    Raises: `ModelError` for an input that the loss does not take, or one that it needs and did not get; `DataError` for features
        that are no preference pairs where it needs these; `UnknownArgumentError` for a misspelt argument of the method itself,
        which comes here as if it were for the loss.
    """
    of_metrics = {name for metric in (state.metrics if training else state.eval_metrics) for name in metric.inputs}
    loss = state.loss or (_DEFAULT_POLICY_LOSS if "advantages" in given else None)
    if loss is None:
        _check_spelling(given, known=of_metrics, cutoff=0.6)
        _refuse_without_loss(given.keys() - of_metrics)
        return _carrying(_DEFAULT_LOSS, dict(given), known=())
    required, optional, takes_any = _signature(loss)
    known = required | optional
    _check_spelling(given, known=known | of_metrics, cutoff=0.85 if takes_any else 0.6)
    inputs = dict(given)
    _take_old_logprobs(inputs, features, known=known, required=required, takes_any=takes_any)
    missing = required - inputs.keys()
    if missing and not training and not given.keys() - of_metrics:
        return _carrying(_DEFAULT_LOSS, {name: value for name, value in given.items() if name in of_metrics}, known=())
    name = loss_name(loss)
    if missing:
        advice = [loss.advice[key] for key in sorted(missing) if key in loss.advice]
        raise ModelError(f"The loss `{name}` needs {listing(missing)}, which this call did not get. Pass them beside `inputs=`, "
                         f"one entry a sequence{': ' + '; '.join(advice) if advice else ''}.")
    for key in inputs:
        if key not in known | of_metrics and not takes_any:
            raise ModelError(f"The loss `{name}` takes no input `{key}`.{did_you_mean(key, known)} It takes: {listing(known)}.")
    if loss.requires_pairs:
        _check_pairs(name, features)
    return (loss, inputs) if takes_any else _carrying(loss, inputs, known=known)


def _carrying(loss: Loss, inputs: dict[str, Any], *, known: Collection[str]) -> tuple[Loss, dict[str, Any]]:
    return loss if inputs.keys() <= set(known) else LossForMetrics(loss, known), inputs


def _refuse_without_loss(given: Collection[str]) -> None:
    if given:
        raise ModelError(f"No loss that uses {listing(given)} is set: the default, token-mean cross entropy, takes no inputs. "
                         f"Call `set_loss(...)` first, with a loss that takes it: a function `(outputs, targets, *, "
                         f"{', '.join(sorted(given))})` that returns (sum, count) will do. Installed losses: "
                         f"{listing(registry.names('losses'))}.")


def _check_pairs(name: str, features: Sequence[Any]) -> None:
    """Raise `DataError` unless features come in pairs."""
    ids = [feature.get("pair_id") if isinstance(feature, Mapping) else None for feature in features]
    for index in range(0, len(ids), 2):
        if ids[index] is None or ids[index:index + 2] != [ids[index]] * 2:
            raise DataError(f"The loss `{name}` compares the chosen and the rejected answer of a preference pair, and "
                            f"inputs[{index}] is not the first of one. Encode rows with `chosen` and `rejected` by "
                            "`Dataset.encode()`, or give the two features of each pair one `pair_id`, the chosen one first.")


def _check_spelling(given: Iterable[str], *, known: Collection[str], cutoff: float) -> None:
    for key in given:
        if key == "disable_lora" and key not in known:
            raise UnknownArgumentError("`disable_lora` is an argument of `forward_only` alone: the base model is not trained. "
                                       "Leave it out.")
        if key == "top_logprobs" and key not in known:
            raise UnknownArgumentError("`top_logprobs` is an argument of `forward_only` alone. Leave it out.")
        near = difflib.get_close_matches(key, _ARGUMENTS, n=1, cutoff=cutoff)
        if near and key not in known and not difflib.get_close_matches(key, known, n=1):
            raise UnknownArgumentError(f"There is no argument `{key}`. Did you mean `{near[0]}`? Beside {listing(_ARGUMENTS)}, "
                                       "what the loss takes may be passed.")


def _take_old_logprobs(
    inputs: dict[str, Any], features: Sequence[Any], *, known: Collection[str], required: Collection[str], takes_any: bool,
) -> None:
    """Take the sampler's log-probabilities from the features, as `sampler_logprobs` if the loss takes that, else `old_logprobs`."""
    name = "sampler_logprobs" if "sampler_logprobs" in known else "old_logprobs"
    if name in inputs or not (name in known or takes_any):
        return
    have = [isinstance(feature, Mapping) and "old_logprobs" in feature for feature in features]
    if (have or name in known) and all(have):  # a rank without rows takes part like the others
        inputs[name] = [feature["old_logprobs"] for feature in features]
    elif any(have) and (name in required or name == "sampler_logprobs"):
        raise DataError(f"inputs[{have.index(False)}] has no `old_logprobs`, others have. The loss needs them for every sequence.")


def _signature(loss: Loss) -> tuple[set[str], set[str], bool]:
    """Return (needed inputs, optional inputs, whether any other is taken too)."""
    function = loss.function if isinstance(loss, FunctionLoss) else loss.__call__
    required: set[str] = set()
    optional: set[str] = set()
    takes_any = False
    for parameter in list(inspect.signature(function).parameters.values())[2:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            (required if parameter.default is parameter.empty else optional).add(parameter.name)
    return required, optional, takes_any
