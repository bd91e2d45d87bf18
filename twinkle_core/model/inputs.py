"""What a script passes to `forward_backward`, made ready: features of whatever was given, and the inputs that the loss takes."""

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from twinkle_core import registry
from twinkle_core.data_format import flatten_responses
from twinkle_core.errors import ArgumentTypeError, DataError, ModelError, UnknownArgumentError, did_you_mean, listing
from twinkle_core.loss.cross_entropy import CrossEntropyLoss
from twinkle_core.loss.interface import FunctionLoss, Loss
from twinkle_core.loss.result import loss_name
from twinkle_core.model.adapter import AdapterState

_DEFAULT_LOSS = CrossEntropyLoss()
_ARGUMENTS = ("inputs", "adapter_name", "disable_lora")
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


def choose_loss(
    state: AdapterState, given: Mapping[str, Any], features: Sequence[Any], *, training: bool,
) -> tuple[Loss, dict[str, Any]]:
    """Return the loss to use and its inputs; `old_logprobs` are taken from the features where the loss takes them.

    Without gradients a loss whose inputs were not given gives way to token-mean cross entropy: the call is about
    log-probabilities.

    Raises: `ModelError` for an input that the loss does not take, or one that it needs and did not get; `UnknownArgumentError`
        for a misspelt argument of the method itself, which comes here as if it were for the loss.
    """
    if state.loss is None:
        _check_spelling(given, known=(), cutoff=0.6)
        if given:
            raise ModelError(f"No loss that uses {listing(given)} is set: the default, token-mean cross entropy, takes no inputs. "
                             f"Call `set_loss(...)` first, with a loss that takes it: a function `(outputs, targets, *, "
                             f"{', '.join(given)})` that returns (sum, count) will do. Installed losses: "
                             f"{listing(registry.names('losses'))}.")
        return _DEFAULT_LOSS, {}
    required, optional, takes_any = _signature(state.loss)
    _check_spelling(given, known=required | optional, cutoff=0.85 if takes_any else 0.6)
    inputs = dict(given)
    if "old_logprobs" not in inputs and ("old_logprobs" in required | optional or takes_any):
        _take_old_logprobs(inputs, features, is_required="old_logprobs" in required)
    missing = required - inputs.keys()
    if missing and not training and not given:
        return _DEFAULT_LOSS, {}
    name = loss_name(state.loss)
    if missing:
        raise ModelError(f"The loss `{name}` needs {listing(missing)}, which this call did not get. Pass them beside `inputs=`, "
                         "one entry a sequence.")
    for key in inputs:
        if key not in required | optional and not takes_any:
            allowed = required | optional
            raise ModelError(f"The loss `{name}` takes no input `{key}`.{did_you_mean(key, allowed)} It takes: {listing(allowed)}.")
    return state.loss, inputs


def _check_spelling(given: Iterable[str], *, known: Collection[str], cutoff: float) -> None:
    for key in given:
        if key == "disable_lora" and key not in known:
            raise UnknownArgumentError("`disable_lora` is an argument of `forward_only` alone: the base model is not trained. "
                                       "Leave it out.")
        near = difflib.get_close_matches(key, _ARGUMENTS, n=1, cutoff=cutoff)
        if near and key not in known and not difflib.get_close_matches(key, known, n=1):
            raise UnknownArgumentError(f"There is no argument `{key}`. Did you mean `{near[0]}`? Beside {listing(_ARGUMENTS)}, "
                                       "what the loss takes may be passed.")


def _take_old_logprobs(inputs: dict[str, Any], features: Sequence[Any], *, is_required: bool) -> None:
    have = [isinstance(feature, Mapping) and "old_logprobs" in feature for feature in features]
    if have and all(have):
        inputs["old_logprobs"] = [feature["old_logprobs"] for feature in features]
    elif any(have) and is_required:
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
