"""Contract suites and fakes for the tests of plugins. May import everything in the core, is imported by nothing in it.

Each suite is imported when its name is used, so that a template's tests do not need torch.
"""

import importlib
from typing import Any

_SUITES = {
    "HubContract": "hubs",
    "SamplerContract": "samplers",
    "TemplateContract": "templates",
    "TrainableModelContract": "models",
}


def __getattr__(name: str) -> Any:
    if name not in _SUITES:
        raise AttributeError(f"module `twinkle_core.testing` has no attribute `{name}`. It has: {', '.join(_SUITES)}")
    return getattr(importlib.import_module(f"twinkle_core.testing.{_SUITES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_SUITES)
