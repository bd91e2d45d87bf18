"""Every error that Twinkle raises on purpose.

Each class is a `TwinkleError` and also the builtin exception it is closest to, so `except ValueError` in a user's script keeps
working. A message says what was wrong, the value, what is allowed and what to do. Foreign exceptions are translated once, at
the boundary, with `raise ... from error`.

    TwinkleError
    |-- ArgumentError (ValueError)              an argument, option or environment variable has a value that is not allowed
    |   |-- MeshError                           sizes that do not fit each other or the number of processes
    |   `-- UsageError                          a command line that cannot be understood; exit status 2
    |-- ArgumentTypeError (TypeError)           an argument of a wrong type
    |   `-- UnknownArgumentError                a keyword that the called function does not have
    |-- ModeError (RuntimeError)                two modes, or a call that the present mode or state does not allow
    |-- WorkerError (RuntimeError)              a worker died, or raised what cannot be carried to the script
    |-- PluginError (RuntimeError)
    |   |-- BrokenPluginError                   an installed plugin cannot be loaded, or one of its names cannot
    |   `-- DuplicateNameError                  two distributions claim one name
    |-- UnknownNameError (ImportError, LookupError)  no plugin registers this name
    |-- MissingPluginError (ImportError)        a known distribution that is not installed registers this name
    |-- MissingExtraError (ImportError)         an optional dependency of an installed distribution is not installed
    |-- RemoteAttributeError (AttributeError)   an attribute that lives on the workers
    |-- HubError (OSError)                      a model or dataset cannot be found or fetched
    |-- DataError (ValueError)                  a row, a column layout or a file of data is not usable
    |   `-- TemplateError                       a conversation cannot be rendered, or its labels cannot be found
    |-- ModelError (RuntimeError)               a model or adapter cannot do what was asked
    |-- NonFiniteLossError (ArithmeticError)    the loss of a step is NaN or infinite
    |-- CheckpointError (RuntimeError)          a checkpoint is incomplete, damaged or of another model, or cannot be written
    `-- SamplerError (RuntimeError)             sampling failed, or an adapter cannot be used by the sampler
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


_MOST_LISTED = 15
"""Arguments beyond which a list of them hides the one that was meant."""


class TwinkleError(Exception):
    """Base of all errors that Twinkle raises on purpose."""


class ArgumentError(TwinkleError, ValueError):
    """An argument, option or environment variable has a value that is not allowed."""


class MeshError(ArgumentError):
    """Sizes of a mesh or group do not fit each other, the model, or the number of processes."""


class UsageError(ArgumentError):
    """A command line that cannot be understood. `twinkle` ends with exit status 2."""


class ArgumentTypeError(TwinkleError, TypeError):
    """An argument is of a type that is not accepted."""


class UnknownArgumentError(ArgumentTypeError):
    """A keyword argument that the called function does not have."""


class ModeError(TwinkleError, RuntimeError):
    """Two parts ask for different modes, or the call does not fit the present mode or state."""


class WorkerError(TwinkleError, RuntimeError):
    """A process that holds a component died, or raised an error that cannot be carried to the script."""


class PluginError(TwinkleError, RuntimeError):
    """An installed plugin breaks the rules of `twinkle_core.hookspecs`."""


class BrokenPluginError(PluginError):
    """A plugin, or the object behind one of its names, cannot be loaded."""


class DuplicateNameError(PluginError):
    """Two distributions register the same name."""


class UnknownNameError(TwinkleError, ImportError, LookupError):
    """No installed plugin registers the name.

    It is an `ImportError` and not an `AttributeError`, because `from twinkle.sampler import Typo` would replace the text of an
    `AttributeError` by its own.
    """


class MissingPluginError(TwinkleError, ImportError):
    """The name belongs to a known distribution that is not installed."""


class MissingExtraError(TwinkleError, ImportError):
    """An optional dependency is not installed."""


class RemoteAttributeError(TwinkleError, AttributeError):
    """The attribute exists on the workers only; a handle shows the marked methods."""


class HubError(TwinkleError, OSError):
    """A model or dataset is neither on disk, nor in a cache, nor can it be fetched."""


class DataError(TwinkleError, ValueError):
    """A row, a column layout or a data file cannot be used."""


class TemplateError(DataError):
    """A conversation cannot be rendered or parsed by the chat template, or its labels cannot be found.

    Attributes:
        row: position of the row in the batch or dataset, or None; whoever knows the dataset may set it anew.
        turn: position of the message in the conversation, or None.
    """

    def __init__(self, message: str, *, row: int | None = None, turn: int | None = None) -> None:
        super().__init__(message)
        self.row = row
        self.turn = turn

    def __str__(self) -> str:
        places = [f"{name} {position}" for name, position in (("row", self.row), ("turn", self.turn)) if position is not None]
        message = super().__str__()
        return f"In {', '.join(places)}: {message}" if places else message


class ModelError(TwinkleError, RuntimeError):
    """A model, adapter, loss or optimizer cannot do what was asked."""


class NonFiniteLossError(TwinkleError, ArithmeticError):
    """The loss of a step is NaN or infinite."""


class CheckpointError(TwinkleError, RuntimeError):
    """A checkpoint is incomplete, damaged, of another model, or cannot be written."""


class SamplerError(TwinkleError, RuntimeError):
    """Sampling failed, or the sampler cannot use an adapter."""


def first_line(error: BaseException) -> str:
    """Return the first line of a foreign error's text, or its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def near_matches(name: str, allowed: Iterable[str]) -> list[str]:
    """Return up to three of `allowed` that look like `name`, likeliest first, ignoring case.

    One that consists of the initials of `name` ("lr" of "learning_rate"), or has it as one of its words, looks like it too.
    """
    by_lower = {candidate.lower(): candidate for candidate in allowed}
    word = name.lower()
    initials = "".join(part[:1] for part in word.split("_")) if "_" in word else ""
    kin = [candidate for candidate in by_lower if candidate == initials or ("_" in candidate and word in candidate.split("_"))]
    close = difflib.get_close_matches(word, list(by_lower), n=3, cutoff=0.6)
    return [by_lower[match] for match in dict.fromkeys([*close, *kin])][:3]


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return " Did you mean `x`?" for the likeliest of `allowed`, or "" when none is close."""
    matches = near_matches(name, allowed)
    return f" Did you mean {' or '.join(f'`{match}`' for match in matches)}?" if matches else ""


def listing(names: Iterable[str]) -> str:
    """Return "`a`, `b`", sorted, or "none"."""
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


def check_flag(name: str, value: object, *, none: str | None = None) -> None:
    """Raise `ArgumentTypeError` unless `value` is True or False. `none` says what None means, where that is allowed too."""
    if not isinstance(value, bool) and (value is not None or none is None):
        raise ArgumentTypeError(f"`{name}={value!r}` is of type {type(value).__name__}. Use True or False"
                                f"{'' if none is None else f', or None: {none}'}.")


def check_count(name: str, value: object, *, least: int, none: str | None = None) -> None:
    """Raise `ArgumentError` unless `value` is an integer >= `least`. `none` says what None means, where that is allowed too."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not is_count and (value is not None or none is None):
        raise ArgumentError(f"`{name}={value!r}`: use an integer >= {least}{'' if none is None else f', or None {none}'}.")


def check_finite(name: str, value: object) -> None:
    """Raise `ArgumentError` if `value`, or a number in it, is NaN or infinite. Other values are left to whoever takes them."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ArgumentError(f"`{name}={value!r}` is not finite: the weights would be NaN after one step. Use a finite number.")
    if isinstance(value, list | tuple):
        for entry in cast("Sequence[object]", value):
            check_finite(name, entry)
    if isinstance(value, Mapping):
        for key, entry in cast("Mapping[object, object]", value).items():
            check_finite(f"{name}[{key!r}]", entry)


def check_keywords(what: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise `UnknownArgumentError` if `given` holds a keyword that is not in `allowed`. `what` is the function's name."""
    permitted = list(allowed)
    for name in given:
        if name not in permitted:
            hint = did_you_mean(name, permitted)
            takes = "" if hint and len(permitted) > _MOST_LISTED else f" It takes: {listing(permitted)}."
            raise UnknownArgumentError(f"`{what}` has no argument `{name}`.{hint}{takes}")


def checks_keywords(method: Callable[P, R], name: str = "") -> Callable[P, R]:
    """Return `method` with `UnknownArgumentError` and near matches for a keyword that it does not have.

    `name` is what the error calls it; left out: its own name, of a constructor the class's.
    """
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return method

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kwargs.keys() <= parameters.keys():
            check_keywords(name or method.__qualname__.removesuffix(".__init__"), kwargs,
                           [parameter for parameter in parameters if parameter != "self"])
        return method(*args, **kwargs)

    return checked
