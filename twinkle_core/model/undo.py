"""Putting a module back as it was when changing it fails half-way.

Everything that Python code can change is kept by reference: submodules, hooks, plain attributes, which tensor a parameter holds and
whether it is trained. What is written into a tensor's own memory is not.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def undone_on_error(module: torch.nn.Module) -> Iterator[None]:
    """Restore `module` and all modules in it if the block raises."""
    attributes = [(part, {key: _copied(value) for key, value in vars(part).items()}, dict(vars(part)))
                  for part in module.modules()]
    parameters = [(parameter, parameter.data, parameter.requires_grad) for parameter in module.parameters()]
    try:
        yield
    except BaseException:
        for part, contents, values in attributes:
            live = vars(part)
            live.clear()
            live.update(values)
            for key, content in contents.items():
                _restore(values[key], content)
        for parameter, data, requires_grad in parameters:
            parameter.data = data
            parameter.requires_grad_(requires_grad)
        raise


def _copied(value: Any) -> Any:
    """Return a copy of a container, which may change in place; None for what may not."""
    return value.copy() if isinstance(value, dict | list | set) else None


def _restore(value: Any, content: Any) -> None:
    if content is None:
        return
    value.clear()
    if isinstance(value, list):
        value.extend(content)
    else:
        value.update(content)
