"""The metaclass that lets a launcher decide where a component is built."""

import inspect
from abc import ABCMeta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from twinkle_core import session
from twinkle_core.errors import ArgumentTypeError, check_keywords, checks_keywords

C = TypeVar("C", bound=type)


class RemoteMeta(ABCMeta):
    """Makes `Cls(...)` ask the session's launcher, and misspelt keywords an error with near matches.

    `__call__` is hidden from type checkers, which would otherwise take every constructor for `Any`; `inspect.signature(Cls)`
    stays as written.
    """

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> "RemoteMeta":
        for attribute, value in namespace.items():
            overrides = any(hasattr(getattr(base, attribute, None), "__remote_mark__") for base in bases)
            if hasattr(value, "__remote_mark__") or (overrides and inspect.isfunction(value)):
                namespace[attribute] = checks_keywords(value, f"{name}.{attribute}")
        return super().__new__(mcls, name, bases, namespace, **kwargs)

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            signature = inspect.signature(cls)
            _check(cls.__name__, signature, kwargs)
            try:
                bound = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise ArgumentTypeError(f"`{cls.__name__}(...)`: {error}. Call it as `{cls.__name__}{signature}`.") from error
            current = session.current()
            return current.launcher.create(
                cls, args, kwargs, group=current.group(bound.get("remote_group")), mesh=bound.get("device_mesh"))

        @property
        def __signature__(cls) -> inspect.Signature:
            if cls.__init__ is object.__init__:
                return inspect.Signature()
            return inspect.Signature(list(inspect.signature(cls.__init__).parameters.values())[1:])


class RemoteComponent(metaclass=RemoteMeta):
    """Base of components: `class Counter(RemoteComponent)`. Constructors take `remote_group=None, device_mesh=None`.

    Class attributes:
        stays_with_script: whether a component without `remote_group` is built in the script's own process. Otherwise it goes to the
            group of ranks, where there is one only.
    """

    stays_with_script: ClassVar[bool] = False


def build(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return `cls(*args, **kwargs)` built in this process: what a launcher calls where the component is to live."""
    component: Any = type.__call__(cls, *args, **kwargs)  # past `RemoteMeta.__call__`, which would ask the launcher again
    return component


def remote_class(cls: C) -> C:
    """Return `cls` as a component, for a class that does not derive from `RemoteComponent`.

        @remote_class
        class Counter:
            @remote_function(dispatch="all", collect="first")
            def add(self, n): ...
    """
    namespace = {name: value for name, value in vars(cls).items() if hasattr(value, "__remote_mark__")}
    namespace |= {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return RemoteMeta(cls.__name__, (cls,), namespace)  # type: ignore[return-value]


def _check(name: str, signature: inspect.Signature, kwargs: dict[str, Any]) -> None:
    if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        check_keywords(name, kwargs, [parameter for parameter in signature.parameters if parameter != "self"])
