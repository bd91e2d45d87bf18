"""A handle: what a script holds when the component lives elsewhere.

`isinstance(handle, Cls)` holds, the marked methods go to the launcher, and any other attribute is an error that says where it
lives. The object behind it is the launcher's business.
"""

import functools
from typing import Any

from twinkle_core.errors import RemoteAttributeError, did_you_mean, listing
from twinkle_core.remote.component import RemoteMeta
from twinkle_core.remote.marks import find_mark, marked_methods

_OWN = frozenset({"__class__", "__repr__", "__dict__", "__doc__", "__module__", "__reduce_ex__", "__reduce__", "__hash__",
                  "__eq__", "__ne__", "__init_subclass__", "__setattr__", "__getattribute__", "__getstate__", "__dir__",
                  "__len__", "__iter__", "__getitem__", "_twinkle_ref", "_twinkle_launcher"})


def make_handle(cls: type[Any], *, launcher: Any, ref: Any) -> Any:
    """Return a handle on a component of class `cls`. `ref` is what `launcher.call` finds the ranks by: `ref_of(handle)`."""
    handle: Any = object.__new__(_handle_class(cls))  # without __init__, which ran on the workers
    object.__setattr__(handle, "_twinkle_launcher", launcher)
    object.__setattr__(handle, "_twinkle_ref", ref)
    return handle


def ref_of(handle: Any) -> Any:
    """Return the `ref` that the handle was made with."""
    return object.__getattribute__(handle, "_twinkle_ref")


@functools.cache
def _handle_class(cls: type[Any]) -> type[Any]:
    methods = {name: _forward(cls, name) for name in marked_methods(cls)}
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__getattribute__": _make_getattribute(cls, frozenset(methods)),
        "__setattr__": _refuse_set,
        "__repr__": _represent,
        "__reduce_ex__": _reduce,
        "__dir__": _list_methods,
        **methods,
    }
    handle_class = RemoteMeta(cls.__name__, (cls,), namespace)
    handle_class.__abstractmethods__ = frozenset()
    return handle_class


def _forward(cls: type, name: str) -> Any:
    mark = find_mark(cls, name)

    @functools.wraps(getattr(cls, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        launcher = object.__getattribute__(self, "_twinkle_launcher")
        return launcher.call(self, name, args, kwargs, mark)

    return call


def _make_getattribute(cls: type, methods: frozenset[str]) -> Any:
    def getattribute(self: Any, name: str) -> Any:
        if name in methods or name in _OWN:
            return object.__getattribute__(self, name)
        raise RemoteAttributeError(
            f"`{cls.__name__}.{name}` lives on the workers; this is a handle.{did_you_mean(name, methods)} A handle has the marked "
            f"methods: {listing(methods)}. To reach more, mark a method with `@remote_function`.")

    return getattribute


def _represent(self: Any) -> str:
    return f"<handle on {type(self).__name__} at {ref_of(self)!r}>"


def _reduce(self: Any, protocol: int) -> Any:
    return object.__getattribute__(self, "_twinkle_launcher").reduce(self)


def _list_methods(self: object) -> list[str]:
    return marked_methods(type(self))


def _refuse_set(self: Any, name: str, value: Any) -> None:
    raise RemoteAttributeError(f"`{name}` cannot be set on a handle: the object lives on the workers. Use a marked method.")
