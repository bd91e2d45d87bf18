"""Wheels in new environments, outside of the checkout: what a person gets who has pip and nothing of ours.

Each environment installs what constraints.txt pins, from the package index that pip is set to use.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
THIRD_PARTY = ROOT / "tests" / "plugins_third_party"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


class Environment:
    """A new virtual environment and an empty working directory beside it."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.work.mkdir()
        venv.create(folder / "env", with_pip=True)
        self.bin = folder / "env" / "bin"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TWINKLE_") and name != "PYTHONPATH"}
        own = {"OMP_NUM_THREADS": "1", "TWINKLE_CACHE": str(folder / "cache"), "PATH": f"{self.bin}:{os.environ['PATH']}"}
        self.environ = kept | own

    def pip(self, *requirements: str) -> None:
        self.run(self.bin / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *requirements, check=True)

    def run(self, *command: object, check: bool = False) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        run = subprocess.run(words, cwd=self.work, env=self.environ, capture_output=True, text=True, check=False)
        assert not check or run.returncode == 0, f"{command}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
        return run

    def python(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (self.work / "script.py").write_text(script, encoding="utf-8")
        return self.run(self.bin / "python", "script.py", *arguments, check=True)

    def twinkle(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self.run(self.bin / "twinkle", *arguments)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """Every wheel of this repository, and those of the two third-party packages."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = [ROOT, *ROOT.glob("plugins/*"), THIRD_PARTY / "acme-template", THIRD_PARTY / "acme-sampler"]
    for source in sources:
        build = [sys.executable, "-m", "build", "-q", "--wheel", "--outdir", folder, source]
        subprocess.run(build, check=True, capture_output=True)
    assert len(list(folder.iterdir())) == len(sources)
    return folder


def wheel(folder: Path, name: str) -> str:
    [path] = folder.glob(f"{name.replace('-', '_')}-*.whl")
    return str(path)


def environment(tmp_path: Path, requirements: Sequence[str]) -> Environment:
    made = Environment(tmp_path)
    made.pip(*requirements)
    return made


def test_the_quickstart_runs_from_wheels_with_train_and_plot(wheels, tmp_path):
    there = environment(tmp_path, [wheel(wheels, "twinkle-core") + "[train,plot]", wheel(wheels, "twinkle-qwen")])
    shutil.copy(ROOT / "examples" / "quickstart.py", there.work)
    run = there.twinkle("launch", "--log-dir", "outputs/quickstart", "--plot", "quickstart.py")
    assert run.returncode == 0, run.stderr
    after = run.stdout.partition("after:")[2].splitlines()[0]
    assert "Twinkle" in after
    left = there.work / "outputs" / "quickstart"
    assert (left / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (left / "model" / "model.safetensors").is_file()
    losses = [json.loads(line)["loss"] for line in (left / "metrics.jsonl").open()]
    assert losses[-1] < losses[0] / 2
    assert there.twinkle("doctor").returncode == 0


WITHOUT_TORCH = """
import importlib.util
from twinkle import DeviceMesh, initialize
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta

assert importlib.util.find_spec("torch") is None
initialize()
data = Dataset(DatasetMeta("tiny://self-cognition"))
data.map("SelfCognitionProcessor", model_name="Twinkle", model_author="us")
data.set_template("Qwen3_5Template", model_id="tiny://qwen3_5", max_length=256)
data.encode()
batches = list(DataLoader(data, batch_size=16, shuffle=True))
assert sum(len(batch) for batch in batches) == len(data)
assert all(any(label != -100 for label in row["labels"]) for batch in batches for row in batch)
mesh = DeviceMesh.from_sizes(pp_size=2, dp_size=2, tp_size=2)
assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
try:
    from twinkle.model import TransformersModel
    TransformersModel("tiny://qwen3_5")
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_data_templates_and_mesh_run_without_torch_and_so_do_third_party_plugins(wheels, tmp_path):
    there = environment(tmp_path, [wheel(wheels, "twinkle-core") + "[data]", wheel(wheels, "twinkle-qwen"),
                                   wheel(wheels, "acme-template"), wheel(wheels, "acme-sampler")])
    run = there.python(WITHOUT_TORCH)
    assert run.stdout.splitlines()[-1].startswith("MissingExtraError")
    assert "pip install 'twinkle-core[train]'" in run.stdout
    used = there.python((THIRD_PARTY / "use_them.py").read_text(encoding="utf-8"))
    assert json.loads(used.stdout.splitlines()[-1])["classes"] == ["acme_template.template", "acme_sampler.sampler"]
    assert there.twinkle("acme", "one", "two").stdout == "two one\n"
    doctor = there.twinkle("doctor")
    assert doctor.returncode == 1
    assert "WRONG torch: not installed\n        Run: pip install 'twinkle-core[train]'" in doctor.stdout


def test_the_bare_core_imports_and_its_command_line_says_what_is_missing(wheels, tmp_path):
    there = environment(tmp_path, [wheel(wheels, "twinkle-core")])
    assert there.python("import twinkle, twinkle.model, twinkle.sampler, twinkle.dataset; print(twinkle.__version__)").stdout
    assert there.twinkle("--help").returncode == 0
    assert [plugin["name"] for plugin in json.loads(there.twinkle("plugins", "--json").stdout)["plugins"]] == ["core"]
    error = there.run(there.bin / "python", "-c", "from twinkle.dataset import Dataset, DatasetMeta\n"
                      "Dataset(DatasetMeta(data=[{'text': 'a'}])).set_template('Qwen3Template', model_id='x')").stderr
    assert "pip install" in error.splitlines()[-1]
    doctor = there.twinkle("doctor")
    assert doctor.returncode == 1
    assert "Traceback" not in doctor.stdout + doctor.stderr
