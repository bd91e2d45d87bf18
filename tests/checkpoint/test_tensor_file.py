"""Files written tensor by tensor are those that safetensors writes at once."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinkle_core.checkpoint.tensor_file import TensorFileWriter, write_tensors
from twinkle_core.errors import CheckpointError

TENSORS = {
    "b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(1.5, dtype=torch.bfloat16), "empty": torch.zeros(0, 4),
    "ids": torch.tensor([1, -2, 3]), "flags": torch.tensor([True, False, True]), "half": torch.linspace(0, 1, 5).half(),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
}


def test_the_file_is_bit_for_bit_what_safetensors_writes_whatever_the_order(tmp_path):
    hollow = {name: tensor.to("meta") for name, tensor in TENSORS.items()}
    write_tensors(tmp_path / "streamed", hollow, stream=iter(reversed(TENSORS.items())), metadata={"format": "pt"})
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "at_once", metadata={"format": "pt"})
    assert (tmp_path / "streamed").read_bytes() == (tmp_path / "at_once").read_bytes()


def test_what_has_memory_is_written_beside_what_comes_out_of_the_stream(tmp_path):
    shapes = {"here": torch.ones(2), "there": torch.empty(3, device="meta")}
    write_tensors(tmp_path / "file", shapes, stream=iter([("there", torch.arange(3.0))]))
    found = load_file(tmp_path / "file")
    assert found["here"].tolist() == [1.0, 1.0]
    assert found["there"].tolist() == [0.0, 1.0, 2.0]


def test_a_tensor_that_never_came_is_an_error(tmp_path):
    shapes = {"one": torch.empty(2, device="meta"), "two": torch.empty(2, device="meta")}
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors, e.g. `two`.*Save it again"):
        write_tensors(tmp_path / "file", shapes, stream=iter([("one", torch.ones(2))]))


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2, dtype=torch.float64)])
def test_a_tensor_of_another_shape_or_dtype_is_an_error(other, tmp_path):
    with (pytest.raises(CheckpointError, match=r"`one` is .* was not laid out.*Save it again"),
          TensorFileWriter(tmp_path / "file", {"one": torch.empty(2, device="meta")}) as writer):
        writer.write("one", other)


def test_a_dtype_that_the_format_lacks_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"dtype torch.complex64, which safetensors lacks. Convert them first"):
        TensorFileWriter(tmp_path / "file", {"one": torch.empty(2, dtype=torch.complex64)})
