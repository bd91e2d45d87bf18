"""Results that stay on the ranks until somebody looks at them.

`Result` is a call with the rule by which its answers are joined. `LazyResult` is what the script holds with `lazy_collect=True`: it
behaves as the plain value and fetches it at the first look; passed to another component it goes there directly (`calls`).
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from twinkle_core.mesh import DeviceMesh
from twinkle_core.remote.collect import join
from twinkle_core.remote.marks import Collect
from twinkle_ray.group import Pending


class Result:
    """What a call returns, once it is collected.

    Attributes:
        pending: the call.
        wanted: the ranks whose values are joined, in this order.
        how: the rule; None: the value of the only rank.
    """

    def __init__(self, pending: Pending, wanted: Sequence[int], how: Collect | None, mesh: DeviceMesh) -> None:
        self.pending = pending
        self.wanted = list(wanted)
        self.how = how
        self._mesh = mesh
        self._fetched: list[Any] = []

    def value(self) -> Any:
        """Return the collected value. Raises: what the call raised."""
        if not self._fetched:
            values = self.pending.fetch(self.wanted)
            self._fetched = [values[0] if self.how is None else self.how(values, self._mesh) if callable(self.how)
                             else join(self.how, values)]  # type: ignore[arg-type]  a name, as it is not callable
        return self._fetched[0]

    @property
    def is_portable(self) -> bool:
        """Whether another rank can join the pieces."""
        return not callable(self.how)

    @property
    def pieces(self) -> int:
        """In how many pieces, in order, the rows of the value lie on the ranks."""
        return len(self.wanted) if self.how == "flatten" else 1

    def refs(self) -> list[Any]:
        """Return where the pieces lie."""
        return [self.pending.values[rank] for rank in self.wanted]

    def units(self) -> list[list[int]] | None:
        """Return for each piece where its rows may be cut, with their number at the end; None if it is no list.

        Waits for the call.
        """
        notes = self.pending.wait()
        found = [notes[rank].units for rank in self.wanted[:self.pieces]]
        units = [piece for piece in found if piece is not None]
        return units if len(units) == len(found) and self.how in ("flatten", "first", "last_pp", None) else None


class LazyResult:
    """Stands for a value that lies on the ranks. Whatever is done with it is done with the value, which is fetched for it once."""

    __slots__ = ("_result",)
    _result: Result

    def __init__(self, result: Result) -> None:
        object.__setattr__(self, "_result", result)

    def __getattr__(self, name: str) -> Any:
        return getattr(result_of(self).value(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(result_of(self).value(), name, value)

    @property
    def __class__(self) -> type:  # type: ignore[override]  so that `isinstance` sees the value's class
        return type(result_of(self).value())

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _same, (result_of(self).value(),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102  as whatever is called
        return result_of(self).value()(*args, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        import numpy as np

        return np.asarray(result_of(self).value(), *args, **kwargs)


def result_of(lazy: LazyResult) -> Result:
    """Return the call behind a lazy result, without looking at its value."""
    return object.__getattribute__(lazy, "_result")


def is_lazy(value: object) -> bool:
    """Whether `value` is a lazy result, without looking at it: `isinstance` would."""
    return type(value) is LazyResult


def _same(value: Any) -> Any:
    return value


def _plain(value: Any) -> Any:
    return result_of(value).value() if is_lazy(value) else value


def _forward(function: Callable[..., Any]) -> Any:
    def method(self: LazyResult, *others: Any) -> Any:
        return function(result_of(self).value(), *map(_plain, others))

    return method


def _reflected(function: Callable[[Any, Any], Any]) -> Any:
    def method(self: LazyResult, other: Any) -> Any:
        return function(_plain(other), result_of(self).value())

    return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY: dict[str, Callable[..., Any]] = {
    "len": len, "iter": iter, "bool": bool, "int": int, "float": float, "str": str, "repr": repr, "hash": hash, "format": format,
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem, "contains": operator.contains,
    "reversed": reversed, "neg": operator.neg, "pos": operator.pos, "abs": abs, "round": round, "index": operator.index, "dir": dir,
}
for _name, _function in _UNARY.items():
    setattr(LazyResult, f"__{_name}__", _forward(_function))
for _name in (*_BINARY, *_COMPARED):
    _operation = getattr(operator, f"__{_name}__")
    setattr(LazyResult, f"__{_name}__", _forward(_operation))
    if _name in _BINARY:
        setattr(LazyResult, f"__r{_name}__", _reflected(_operation))
