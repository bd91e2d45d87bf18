"""Importing is cheap and does nothing else: each module alone, in a process of its own.

The processes are forked from one that has imported nothing of ours, so this takes seconds.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "datasets", "ray", "vllm", "peft", "modelscope", "huggingface_hub", "pandas", "matplotlib")

IMPORT_EACH = """
import importlib, json, os, sys, threading, traceback
import multiprocessing.process

def look(module, heavy):
    try:
        importlib.import_module(module)
    except BaseException:
        return {"error": traceback.format_exc()}
    starts = sys.modules.get("multiprocessing.context")
    return {
        "heavy": sorted(name for name in heavy if name in sys.modules),
        "threads": [thread.name for thread in threading.enumerate()][1:],
        "children": len(multiprocessing.process.active_children()),
        "start_method": starts and starts._default_context.get_start_method(allow_none=True),
    }

modules, heavy, others_first = json.loads(sys.stdin.read())
if others_first:  # what our modules need of others is imported once, then ours are forgotten
    for module in modules:
        look(module, heavy)
    for module in [name for name in sys.modules if name.startswith("twinkle")]:
        del sys.modules[module]
for module in modules:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        with open(write, "w") as file:
            json.dump(look(module, heavy), file)
        os._exit(0)
    os.close(write)
    with open(read) as file:
        print(json.dumps([module, json.loads(file.read())]))
    os.waitpid(pid, 0)
"""


def modules_of(*folders: str) -> list[str]:
    names = []
    for folder in folders:
        package = ROOT / folder
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def import_each(modules: list[str], folder: Path, *, others_first: bool = False) -> dict[str, dict]:
    """Return module -> what there was after importing it alone, with `folder` as the working directory."""
    run = subprocess.run([sys.executable, "-c", IMPORT_EACH], input=json.dumps([modules, HEAVY, others_first]), cwd=folder,
                         capture_output=True, text=True, check=True)
    assert run.stderr == ""
    return dict(json.loads(line) for line in run.stdout.splitlines())


FACE = modules_of("twinkle")
PLUGIN_MODULES = ["twinkle_core.plugin", "twinkle_qwen", "twinkle_qwen.plugin", "twinkle_ray", "twinkle_ray.plugin",
                  "twinkle_ray.launcher"]
INTERFACES = [name for name in modules_of("twinkle_core") if name.endswith(".interface") or name.count(".") <= 1]
LIGHT = list(dict.fromkeys([*FACE, *PLUGIN_MODULES, *INTERFACES]))


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    folder = tmp_path_factory.mktemp("light")
    return import_each(LIGHT, folder), folder


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_imports_no_heavy_library(light, module):
    assert light[0][module].get("heavy") == [], light[0][module].get("error")


@pytest.mark.parametrize("module", [*FACE, *PLUGIN_MODULES])
def test_importing_it_starts_nothing_and_fixes_no_start_method(light, module):
    found = light[0][module]
    assert (found["threads"], found["children"], found["start_method"]) == ([], 0, None)


def test_importing_leaves_no_file_in_the_working_directory(light):
    assert list(light[1].iterdir()) == []


def test_the_face_has_the_modules_that_scripts_are_promised():
    promised = ("dataset", "dataloader", "data_format", "template", "preprocessor", "processor", "model", "loss", "metric",
                "sampler", "reward", "hub", "testing")
    assert {f"twinkle.{name}" for name in promised} <= set(FACE)


def test_the_face_is_small():
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "twinkle").rglob("*.py")) <= 350


@pytest.mark.slow
def test_each_module_of_the_core_can_be_imported_alone(tmp_path):
    found = import_each(modules_of("twinkle_core"), tmp_path, others_first=True)
    assert {module: result["error"] for module, result in found.items() if "error" in result} == {}
    assert {module: result for module, result in found.items() if result["children"]} == {}
    assert list(tmp_path.iterdir()) == []
