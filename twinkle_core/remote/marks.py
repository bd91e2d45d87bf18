"""`@remote_function`: says how a method is called when its object lives on several ranks. It only sets an attribute."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from twinkle_core.errors import ArgumentError, listing

Dispatch = Literal["all", "slice", "slice_dp"] | Callable[..., Any]
Collect = Literal["none", "first", "flatten", "mean", "sum", "last_pp"] | Callable[..., Any]
Execute = Literal["all", "first"]

DISPATCHES = ("all", "slice", "slice_dp")
COLLECTS = ("none", "first", "flatten", "mean", "sum", "last_pp")

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class RemoteMark:
    """How to call a method on the ranks of a group.

    Attributes:
        dispatch: which arguments each rank gets (`twinkle_core.remote.dispatch`).
        collect: what becomes of the ranks' results (`twinkle_core.remote.collect`).
        execute: "all" ranks, or the "first" only.
        sync: whether the caller waits for the call to end even when nothing is collected.
        lazy_collect: whether the result may stay where it is until looked at; None leaves it to the session.
        with_data_state: whether the positions of the script's data loaders go along, for a checkpoint that a rank writes.
    """

    dispatch: Dispatch = "all"
    collect: Collect = "first"
    execute: Execute = "all"
    sync: bool = False
    lazy_collect: bool | None = None
    with_data_state: bool = False


def remote_function(
    *,
    dispatch: Dispatch = "all",
    collect: Collect = "first",
    execute: Execute = "all",
    sync: bool = False,
    lazy_collect: bool | None = None,
    with_data_state: bool = False,
) -> Callable[[F], F]:
    """Mark a method as callable through a handle. Arguments: see `RemoteMark`."""
    for name, value, allowed in (
            ("dispatch", dispatch, DISPATCHES), ("collect", collect, COLLECTS), ("execute", execute, ("all", "first"))):
        if value not in allowed and (not callable(value) or name == "execute"):
            raise ArgumentError(f"`remote_function({name}={value!r})`: use one of {listing(allowed)}"
                                f"{'' if name == 'execute' else ', or a function'}.")
    mark = RemoteMark(dispatch=dispatch, collect=collect, execute=execute, sync=sync, lazy_collect=lazy_collect,
                      with_data_state=with_data_state)

    def set_mark(function: F) -> F:
        function.__remote_mark__ = mark  # type: ignore[attr-defined]
        return function

    return set_mark


def find_mark(cls: type, method: str) -> RemoteMark | None:
    """Return the mark of `cls.method`. A method that overrides a marked one without a mark of its own keeps that mark."""
    for base in cls.__mro__:
        mark = getattr(vars(base).get(method), "__remote_mark__", None)
        if mark is not None:
            return mark
    return None


def marked_methods(cls: type) -> list[str]:
    """Return the names of the methods that a handle on `cls` shows."""
    return sorted({name for base in cls.__mro__ for name, value in vars(base).items() if hasattr(value, "__remote_mark__")})
