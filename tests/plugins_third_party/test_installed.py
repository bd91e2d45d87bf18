"""Two packages of a third party, installed by pip from their folders, used by name with no edit in Twinkle.

`test_wheels.py` does the same from wheels in a new environment.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
USE_THEM = (HERE / "use_them.py").read_text(encoding="utf-8")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def acme(tmp_path_factory):
    folder = tmp_path_factory.mktemp("acme")
    packages = [str(HERE / name) for name in ("acme-template", "acme-sampler")]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index",
                    "--no-build-isolation", "--target", str(folder), *packages], check=True, capture_output=True, text=True)
    return folder


@pytest.fixture
def installed(sandbox, acme):
    sandbox.environ["PYTHONPATH"] = str(acme)
    return sandbox


def test_a_script_uses_them_by_name(installed):
    run = installed.twinkle("launch", installed.script(USE_THEM))
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {
        "text": "[user]\nHi<|im_end|>\n[assistant]\nHello<|im_end|>\n", "supervised": "Hello<|im_end|>", "tokens": [3, 2],
        "classes": ["acme_template.template", "acme_sampler.sampler"]}


def test_they_are_listed_with_what_they_register(installed):
    found = {plugin["name"]: plugin for plugin in json.loads(installed.twinkle("plugins", "--json").stdout)["plugins"]}
    assert [found["acme"][key] for key in ("distribution", "version", "status")] == ["acme-template", "2.3.4", "working"]
    assert found["acme"]["registers"] == {"templates": {"AcmeTemplate": "acme_template.template:AcmeTemplate"}}
    assert found["acme-sampler"]["version"] == "0.7.0"
    table = " ".join(installed.twinkle("plugins").stdout.split())
    assert "acme acme-template 2.3.4 templates AcmeTemplate" in table
    assert "acme-sampler acme-sampler 0.7.0 samplers AcmeSampler hooks add_commands" in table


def test_the_command_of_one_runs(installed):
    assert installed.twinkle("acme", "one", "two").stdout == "two one\n"


def test_each_can_be_disabled_by_its_entry_point(installed):
    installed.environ["TWINKLE_DISABLE_PLUGINS"] = "acme-sampler"
    run = installed.python("-c", "from twinkle.sampler import AcmeSampler")
    assert "UnknownNameError: No installed plugin registers `AcmeSampler` among samplers." in run.stderr
    assert "Disabled by TWINKLE_DISABLE_PLUGINS, and may bring it: `acme-sampler`." in run.stderr
    assert installed.twinkle("acme", "one").returncode == 2
