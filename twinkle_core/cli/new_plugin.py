"""`twinkle plugins new NAME --kind KIND`: a package folder of a new plugin whose tests pass as it stands.

The files lie in `scaffold/`, with `$name` where a name goes. An existing folder is never touched.
"""

import importlib.util
import keyword
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Annotated

import typer

import twinkle_core
from twinkle_core import plugins
from twinkle_core.errors import ArgumentError, UsageError, listing

_SCAFFOLD = Path(__file__).parent / "scaffold"
_EXTRAS = {"template": "data", "sampler": "train"}
"""Kind of plugin -> the extra of twinkle-core that it needs."""

_PEP_508_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Names:
    """Every name of a new plugin.

    Attributes:
        distribution: what pip installs, normalised as PEP 503 says: "acme-template".
        package: what Python imports: "acme_template".
        class_name: what scripts say: "AcmeTemplate".
        title: for people: "Acme".
    """

    distribution: str
    package: str
    class_name: str
    title: str


def new(
    name: Annotated[str, typer.Argument(help="Name of the distribution, e.g. acme-template.")],
    kind: Annotated[str, typer.Option("--kind", metavar="template|sampler", help="What it brings.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where to make the package folder.")] = Path(),
) -> None:
    """Make a package folder for a new plugin; its contract tests pass as it stands."""
    path = create(name, kind, folder)
    print(f"Made {path}. Next:\n  cd {path}\n  pip install -e '.[test]'\n  twinkle plugins\n  pytest")


def create(name: str, kind: str, folder: Path) -> Path:
    """Write the package folder of a plugin and return its path.

    Raises: `UsageError` for a kind or a name that cannot be used; `ArgumentError` if the folder is there or cannot be written.
    """
    if kind not in _EXTRAS:
        raise UsageError(f"`--kind {kind}` is not a kind of plugin that can be made. Use one of: {listing(_EXTRAS)}.")
    names = choose_names(name, kind)
    target = folder / names.distribution
    if target.exists() or target.is_symlink():
        raise ArgumentError(f"`{target}` is there already, and nothing is overwritten. Choose another name or another `--dir`.")
    try:
        for path, text in _render(names, kind).items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"`{target}` cannot be written: {error}. Name a folder that can, with `--dir`.") from error
    return target


def choose_names(name: str, kind: str) -> Names:
    """Return the names of a plugin called `name`. Raises: `UsageError` if pip or Python could not use them."""
    if not _PEP_508_NAME.fullmatch(name):
        raise UsageError(f"`{name}` is not a name that pip can install. Use letters, digits, `-`, `_` and `.`, with a letter or "
                         "digit at both ends, as in `acme-template`.")
    distribution = re.sub(r"[-_.]+", "-", name).lower()
    package = distribution.replace("-", "_")
    if not package.isidentifier() or keyword.iskeyword(package):
        raise UsageError(f"`{name}` makes the package `{package}`, which Python cannot import. Begin with a letter, and use no "
                         "word of the language.")
    if package == kind or importlib.util.find_spec(package) is not None:
        raise UsageError(f"`{name}` makes the package `{package}`, and there is one of that name. Choose a name of your own, as in "
                         f"`acme-{kind}`.")
    for plugin in plugins.load().found:
        if distribution in (plugin.distribution, plugin.name):
            raise UsageError(f"The plugin `{plugin.name}` of `{plugin.distribution}` {plugin.version} is installed already. Choose "
                             "a name of your own.")
    words = [word for word in distribution.split("-") if word not in ("twinkle", kind)] or ["my"]
    title = " ".join(word.capitalize() for word in words)
    return Names(distribution=distribution, package=package, title=title, class_name=title.replace(" ", "") + kind.capitalize())


def _render(names: Names, kind: str) -> dict[str, str]:
    """Return path in the package folder -> text."""
    major, minor, *_ = twinkle_core.__version__.split(".")
    values = {
        **vars(names), "kind": kind, "extra": _EXTRAS[kind], "entry_point": names.package,
        "core_range": f">={major}.{minor},<{major}.{int(minor) + 1}"}

    def fill(scaffold: str) -> str:
        return Template((_SCAFFOLD / f"{scaffold}.tmpl").read_text(encoding="utf-8")).substitute(values)

    values["usage"] = fill(f"usage_{kind}.md").strip()
    package = f"src/{names.package}"
    return {
        "pyproject.toml": fill("pyproject.toml"),
        "README.md": fill("README.md"),
        f"{package}/__init__.py": f'"""{names.class_name}, a {kind} for Twinkle."""\n',
        f"{package}/py.typed": "",
        f"{package}/plugin.py": fill("plugin.py"),
        f"{package}/{kind}.py": fill(f"{kind}.py"),
        f"tests/test_{kind}.py": fill(f"test_{kind}.py"),
    }
