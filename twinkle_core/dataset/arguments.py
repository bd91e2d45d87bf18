"""Turns the class arguments of a dataset - templates and preprocessors - into objects, with errors that name the keyword."""

import inspect
from collections.abc import Sequence
from typing import Any

from twinkle_core import registry
from twinkle_core.errors import ArgumentTypeError, check_keywords
from twinkle_core.preprocessor.builtin import FunctionPreprocessor


def resolve_template(value: Any, options: dict[str, Any]) -> Any:
    """Return the template that `set_template(value, **options)` means."""
    _check_options("templates", value, options, argument="set_template", own=())
    return registry.resolve_argument("templates", value, argument="set_template", options=options)


def resolve_preprocessor(value: Any, options: dict[str, Any], *, own: Sequence[str]) -> Any:
    """Return the preprocessor that `map(value, **options)` means. `own`: the keywords of `map` itself."""
    _check_options("preprocessors", value, options, argument="map", own=own)
    return registry.resolve_argument("preprocessors", value, argument="map", options=options, function=FunctionPreprocessor)


def _check_options(kind: str, value: Any, options: dict[str, Any], *, argument: str, own: Sequence[str]) -> None:
    """Raise for a misspelt or missing argument of the class that `value` is or names."""
    cls = registry.resolve(kind, value) if isinstance(value, str) else value
    if not inspect.isclass(cls):
        if own and options:
            check_keywords(argument, options, own)
        return
    signature = inspect.signature(cls)
    parameters = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        check_keywords(f"{argument}({cls.__name__})", options, [*signature.parameters, *own])
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ArgumentTypeError(f"`{argument}({cls.__name__}, ...)`: {error}. It takes {signature}.") from error
