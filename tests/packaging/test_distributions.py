"""What must agree between the distributions of this repository, and what their wheels hold."""

import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from twinkle_core import registry

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
IDS = [folder.name if folder != ROOT else "twinkle-core" for folder in FOLDERS]


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def packages(folder: Path) -> list[Path]:
    return [folder / name for name in project(folder)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]


def version(folder: Path) -> str:
    path = folder / project(folder)["tool"]["hatch"]["version"]["path"]
    return re.search(r'^__version__ = "(.+)"$', path.read_text(encoding="utf-8"), re.MULTILINE)[1]


def test_every_distribution_has_one_and_the_same_version():
    assert len({version(folder) for folder in FOLDERS}) == 1


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=IDS[1:])
def test_a_plugin_asks_for_this_minor_version_of_the_core(folder):
    major, minor, *_ = version(ROOT).split(".")
    [core] = [text for text in project(folder)["project"]["dependencies"] if text.startswith("twinkle-core")]
    assert core.endswith(f">={major}.{minor},<{major}.{int(minor) + 1}")


def test_the_extras_that_errors_name_are_those_of_the_core():
    declared = project(ROOT)["project"]["optional-dependencies"]
    for extra, modules in registry.EXTRAS.items():
        brought = {re.match(r"[\w-]+", text)[0].replace("-", "_") for text in declared[extra]}
        assert set(modules) <= brought


@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_every_import_package_is_marked_as_typed(folder):
    assert [package for package in packages(folder) if not (package / "py.typed").is_file()] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_every_distribution_is_built_by_hatchling_and_carries_the_licence(folder):
    assert project(folder)["build-system"]["build-backend"] == "hatchling.build"
    assert project(folder)["project"]["license"] == "Apache-2.0"
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=IDS[1:])
def test_a_plugin_module_holds_hooks_and_imports_the_core_only(folder):
    """The core's own `plugin.py` is the exception: it registers every kind, so it is longer, and imports its own parts."""
    for target in project(folder)["project"]["entry-points"]["twinkle"].values():
        text = (folder / "src" / Path(*target.split("."))).with_suffix(".py").read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 40
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE))
        assert imported <= {"twinkle_core", "collections", "typing"}


@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_a_wheel_holds_its_packages_with_their_data_and_no_tests(folder, tmp_path):
    subprocess.run([sys.executable, "-m", "build", "-q", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(folder)],
                   check=True, capture_output=True, text=True)
    [path] = tmp_path.iterdir()
    with zipfile.ZipFile(path) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
        [metadata] = [Parser().parsestr(wheel.read(name).decode()) for name in wheel.namelist() if name.endswith("/METADATA")]
    list_files = ["git", "ls-files", *map(str, packages(folder))]
    tracked = subprocess.run(list_files, cwd=folder, check=True, capture_output=True, text=True)
    base = packages(folder)[0].parent.relative_to(folder)
    assert {str(Path(name).relative_to(base)) for name in tracked.stdout.splitlines()} <= files
    assert {name.partition("/")[0] for name in files} == {package.name for package in packages(folder)}
    assert [name for name in files if "/tests/" in name or ("/test_" in name and name.endswith(".py"))] == []
    assert metadata["Version"] == version(folder)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
