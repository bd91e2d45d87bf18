"""What ranks read of a checkpoint before anything is changed."""

import pytest
import torch
from safetensors.torch import save_file

from twinkle_core.errors import CheckpointError
from twinkle_core.model.taking import read_outline


def test_state_of_a_parameters_shape_is_read_without_memory_and_other_state_whole(tmp_path):
    save_file({"w::exp_avg": torch.ones(4, 2), "w::step": torch.tensor(3.0), "w::row": torch.arange(4.0)}, tmp_path / "state")
    found = read_outline({"w": torch.empty(4, 2)})(tmp_path / "state")
    assert found["w::exp_avg"].is_meta
    assert found["w::exp_avg"].shape == (4, 2)
    assert found["w::step"] == 3.0
    assert found["w::row"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_gradients_of_an_unfinished_step_are_refused(tmp_path):
    save_file({"w": torch.ones(4, 2)}, tmp_path / "gradients")
    with pytest.raises(CheckpointError, match=r"gradients.*Resume it with one process"):
        read_outline({"w": torch.empty(4, 2)})(tmp_path / "gradients")
