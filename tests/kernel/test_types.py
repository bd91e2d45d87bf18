"""What a type checker sees of the face: full signatures, typos flagged, the metaclass out of the way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
from twinkle import DeviceMesh
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler, TorchSamplr
from twinkle.template import Qwen3_5Template

reveal_type(TransformersModel(model_id="x"))
reveal_type(Dataset(DatasetMeta("x")))
TransformersModel(model_idd="x")
TransformersModel(model_id="x").forward_backwards([])
DeviceMesh.from_sizes(tp=2)
reveal_type(TorchSampler("x").sample([]))
'''


@pytest.mark.slow
def test_pyright_sees_constructors_and_flags_typos(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard"}))
    run = subprocess.run([sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)],
                         capture_output=True, text=True, check=False)
    found = [(d["range"]["start"]["line"] + 1, d["severity"], d["message"]) for d in json.loads(run.stdout)["generalDiagnostics"]]
    by_line = {line: message for line, _, message in found}
    assert by_line[8] == 'Type of "TransformersModel(model_id="x")" is "TransformersModel"'
    assert by_line[9] == 'Type of "Dataset(DatasetMeta("x"))" is "Dataset"'
    assert by_line[13] == 'Type of "TorchSampler("x").sample([])" is "list[SampleResponse]"'
    errors = {line for line, severity, _ in found if severity == "error"}
    assert errors == {5, 10, 11, 12}
    assert "TorchSamplr" in by_line[5]
