"""Every Python block of the README and the documentation runs: a page's blocks one after the other, in an empty folder.

The tests that a page shows run too."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "plugins").glob("*/README.md"))]
BLOCK = re.compile(r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    found = []
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        indent = len(match["indent"])
        found.append("\n".join(line[indent:] for line in match["code"].splitlines()))
    return found


def run(page: Path, tmp_path: Path, *command: str) -> None:
    """Write the blocks of a page as a script and run it, as an argument of `command`, in an empty folder."""
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(blocks(page)), encoding="utf-8")
    work = tmp_path / "work"
    work.mkdir()
    run = subprocess.run([sys.executable, *command, str(script)], cwd=work, capture_output=True, text=True, check=False,
                         env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, f"{page.name}:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if "class Test" in "".join(blocks(page))],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tests_that_a_page_defines_pass(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}")  # fails if it collects no test


def test_every_page_of_the_documentation_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in navigation] == []


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
