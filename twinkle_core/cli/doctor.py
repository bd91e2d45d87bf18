"""Say whether training can run here.

`twinkle doctor` shows versions, devices, hubs and plugins, and for each thing that is wrong what to run. It changes nothing.
"""

import importlib
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import twinkle_core
from twinkle_core import plugins, registry, settings
from twinkle_core.cli.commands import Help
from twinkle_core.errors import MissingExtraError, TwinkleError

TRAINING = {
    "torch": "torch", "transformers": "transformers", "peft": "peft", "safetensors": "safetensors", "datasets": "datasets",
    "jinja2": "jinja2", "modelscope": "modelscope", "huggingface_hub": "huggingface_hub",
}
"""Distributions without which training cannot run -> what to import."""

OPTIONAL = {"matplotlib": "plot", "tensorboard": "tensorboard"}
"""Distribution -> the extra of twinkle-core that brings it."""

_INSTALL = "pip install 'twinkle-core[train]'"
_GIB = 2**30

Verdict = Literal["ok", "note", "wrong"]

_MARKS: dict[Verdict, tuple[str, str]] = {"ok": ("ok   ", "32"), "note": ("note ", "33"), "wrong": ("WRONG", "1;31")}
"""Text and terminal colour."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        what: its subject.
        text: what was found.
        verdict: "wrong" means that training cannot run; "note" is worth knowing.
        remedy: what to run or to change; "" where nothing is wrong.
    """

    what: str
    text: str
    verdict: Verdict = "ok"
    remedy: str = ""


def doctor(asks_help: Help = False) -> int:
    """Say whether training can run here.

    Shows versions, devices, hubs and plugins, and what to run where something is wrong. The exit status is 0 if training can run.
    """
    sections: dict[str, Callable[[], Iterator[Finding]]] = {
        "environment": _environment, "libraries": _libraries, "devices": _devices, "hubs": _hubs, "plugins": _plugins}
    is_wrong = False
    for title, examine in sections.items():
        print(_styled(title, "1"))
        for finding in examine():
            is_wrong |= finding.verdict == "wrong"
            print(f"  {_styled(*_MARKS[finding.verdict])} {finding.what}: {finding.text}")
            if finding.remedy:
                print(f"        {finding.remedy}")
    print("Training cannot run here: mend what is marked WRONG." if is_wrong else "Training can run here.")
    return int(is_wrong)


def _styled(text: str, code: str) -> str:
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() else text


def _environment() -> Iterator[Finding]:
    is_new_enough = sys.version_info >= (3, 11)
    yield Finding("python", f"{platform.python_version()} ({sys.executable}) on {platform.platform(terse=True)}",
                  "ok" if is_new_enough else "wrong", "" if is_new_enough else "Install Python 3.11 or newer.")
    yield from (Finding(name, version) for name, version in sorted({
        plugin.distribution: plugin.version for plugin in plugins.load().found}.items()))
    yield _owner_of_the_import_name()
    yield from _hidden_by_this_folder()
    yield _command_on_path()
    try:
        settings.check_environ()
        settings.trust_remote_code()
    except TwinkleError as error:
        yield Finding("environment variables", str(error), "wrong")


def _owner_of_the_import_name() -> Finding:
    """`import twinkle` must give ours: another distribution may own that name, or a folder may hide it."""
    owners = set(metadata.packages_distributions().get("twinkle", ())) - {"twinkle-core"}
    if owners:
        other = min(owners)
        return Finding("import twinkle", f"the distribution `{other}` also installs a package `twinkle`", "wrong",
                       f"Run: pip uninstall {other}; pip install --force-reinstall --no-deps twinkle-core")
    spec = importlib.util.find_spec("twinkle")
    ours = Path(twinkle_core.__file__).resolve().parent.parent / "twinkle"
    places = [Path(place).resolve() for place in spec.submodule_search_locations or ()] if spec is not None else []
    if places != [ours]:
        where = f"`{places[0]}`, not `{ours}`" if places else f"nothing, though it should be `{ours}`"
        return Finding("import twinkle", f"finds {where}", "wrong",
                       "Rename that folder, or take its parent out of PYTHONPATH." if places else f"Run: {_INSTALL}")
    return Finding("import twinkle", str(ours))


def _hidden_by_this_folder() -> Iterator[Finding]:
    """A script in the working directory imports what lies beside it first."""
    ours = Path(twinkle_core.__file__).resolve().parent.parent
    for name in ("twinkle", "twinkle_core"):
        for path in (Path(f"{name}.py"), Path(name, "__init__.py")):
            if path.is_file() and Path.cwd().resolve() != ours:
                yield Finding(f"import {name}", f"`{path}` in this folder would be imported instead by a script beside it", "note",
                              "Rename it.")


def _command_on_path() -> Finding:
    found = shutil.which("twinkle")
    folder = Path(sys.executable).parent
    if found is None:
        return Finding("twinkle on PATH", "not found", "note", f"Run: export PATH={folder}{os.pathsep}$PATH")
    if Path(found).parent.resolve() != folder.resolve():
        return Finding("twinkle on PATH", f"`{found}` belongs to another environment than this Python ({folder})", "note",
                       f"Run: export PATH={folder}{os.pathsep}$PATH")
    return Finding("twinkle on PATH", found)


def _libraries() -> Iterator[Finding]:
    for name, module in TRAINING.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name, "not installed", "wrong", f"Run: {_INSTALL}")
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  the boundary to foreign code: a broken build is what is looked for
            yield Finding(name, f"{version} is installed, but importing it raised {type(error).__name__}: {error}", "wrong",
                          f"Run: pip install --force-reinstall {name}=={version}" if _has_docstrings() else
                          "Run Python without -OO (PYTHONOPTIMIZE=2), which takes away docstrings that it reads.")
            continue
        wanted = _wanted_versions(name)
        if wanted and not _fits(version, wanted):
            yield Finding(name, f"{version}, but twinkle-core needs {wanted}", "wrong", f"Run: pip install '{name}{wanted}'")
        else:
            yield Finding(name, version)
    for name, extra in OPTIONAL.items():
        try:
            yield Finding(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, "not installed (optional)", "note", f"Run: pip install 'twinkle-core[{extra}]'")


def _has_docstrings() -> bool:
    return sys.flags.optimize < 2


def _wanted_versions(name: str) -> str:
    """Return which versions of a distribution twinkle-core asks for, e.g. "<3,>=2"; "" if it does not say."""
    for requirement in metadata.requires("twinkle-core") or ():
        found = re.match(rf"{name.replace('_', '[-_]')}\s*([<>=!~][^;]*)", requirement)
        if found is not None:
            return found[1].strip()
    return ""


def _fits(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet  # comes with every one of the libraries that are looked at

    return SpecifierSet(wanted).contains(version, prereleases=True)


def _devices() -> Iterator[Finding]:
    for name in sorted(registry.names("platforms")):
        try:
            device = registry.resolve("platforms", name)()
            count = device.count()
            for index in range(count):
                free, total = device.memory_bytes(index)
                yield Finding(f"{name}:{index}", f"{device.describe(index)}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free")
            if count == 0:
                yield Finding(name, "none")
        except MissingExtraError as error:
            yield Finding(name, "cannot be looked at", "note", str(error))
        except Exception as error:  # noqa: BLE001  the boundary to foreign code: drivers fail in their own ways
            yield Finding(name, f"{type(error).__name__}: {error}", "wrong" if name == "cpu" else "note")


def _hubs() -> Iterator[Finding]:
    for name in sorted(registry.names("hubs")):
        try:
            yield Finding(f"{name}://", registry.resolve("hubs", name)().describe())
        except MissingExtraError as error:
            yield Finding(f"{name}://", "cannot be used", "note", str(error))
        except Exception as error:  # noqa: BLE001  the boundary to foreign code, as above
            yield Finding(f"{name}://", f"{type(error).__name__}: {error}", "note")


def _plugins() -> Iterator[Finding]:
    from twinkle_core.cli.plugins import find_conflicts

    for plugin in plugins.load().found:
        what = f"{plugin.name} ({plugin.distribution} {plugin.version})"
        if plugin.is_broken:
            yield Finding(what, plugin.reason, "note", f"Run: pip install --upgrade {plugin.distribution}, or pip uninstall it")
        else:
            count = sum(len(names) for names in plugin.names.values())
            yield Finding(what, plugin.reason or f"registers {count} names")
    for conflict in find_conflicts():
        yield Finding(f"`{conflict['name']}` among {conflict['kind']}", f"claimed by {' and '.join(conflict['distributions'])}",
                      "note", f"Run: pip uninstall {conflict['distributions'][-1]}")
