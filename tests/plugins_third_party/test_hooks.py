"""Every hook has its heading in the documentation, its interface, and a test that goes through it."""

import re
from pathlib import Path

import pytest

from twinkle_core import hookspecs, plugins, registry

ROOT = Path(__file__).resolve().parents[2]
HOOKS = [name for name, value in vars(hookspecs).items() if hasattr(value, "twinkle_spec")]
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
TESTS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
REGISTRIES = [name for name in HOOKS if name.startswith("twinkle_register_")]


def test_the_headings_of_the_hooks_are_the_hooks_in_their_order():
    assert re.findall(r"^### `(twinkle_\w+)`$", PAGE, re.MULTILINE) == HOOKS


@pytest.mark.parametrize("hook", [name for name in HOOKS if name not in REGISTRIES])
def test_every_behavioural_hook_is_implemented_in_a_test(hook):
    assert f"def {hook}(" in TESTS


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_says_when_it_is_called_and_by_whom(hook):
    text = getattr(hookspecs, hook).__doc__
    assert "When: " in text
    assert "Who: " in text


@pytest.mark.parametrize("hook", HOOKS)
def test_no_hook_lets_the_order_of_installation_decide(hook):
    assert getattr(hookspecs, hook).twinkle_spec["firstresult"] is False


def test_every_registry_has_an_interface_that_its_documentation_names():
    kinds = [name.removeprefix("twinkle_register_") for name in REGISTRIES]
    assert set(kinds) == set(registry.INTERFACES) == set(plugins.KINDS)
    for kind in kinds:
        section = PAGE.partition(f"### `twinkle_register_{kind}`")[2].partition("###")[0]
        assert f"`{registry.INTERFACES[kind].replace(':', '.')}`" in section, kind


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_every_interface_can_be_imported(kind):
    assert isinstance(registry.import_target(registry.INTERFACES[kind]), type)


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_everything_that_is_registered_resolves(kind):
    for name in registry.names(kind):
        assert registry.resolve(kind, name) is not None
