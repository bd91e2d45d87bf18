"""A safetensors file, written tensor by tensor in any order, so that what is written need never be held at once.

Its head, which names shapes and places, is written first: shapes are known before values. Format: huggingface.co/docs/safetensors.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file

from twinkle_core.errors import CheckpointError

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8

Stream = Iterator[tuple[str, torch.Tensor]]
"""(name, tensor), one after the other."""


class TensorFileWriter:
    """Writes one file: in a `with` block call `write` for each tensor.

    Args:
        path: of the file.
        shapes: name -> tensor whose shape and dtype are meant; it may be hollow.
        metadata: for the head.

    Raises: `CheckpointError` for a dtype that the format lacks, or at the end of the block if a tensor was not written.
    """

    def __init__(self, path: Path, shapes: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None) -> None:
        self._path, self._shapes = path, dict(shapes)
        if unknown := [tensor.dtype for tensor in shapes.values() if tensor.dtype not in _NAMES]:
            raise CheckpointError(f"`{path}` cannot hold tensors of dtype {unknown[0]}, which safetensors lacks. Convert them "
                                  "first.")
        self._begins: dict[str, int] = {}
        head: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name, tensor in sorted(shapes.items(), key=lambda item: (-item[1].element_size(), item[0])):  # wide ones first: aligned
            end = offset + tensor.numel() * tensor.element_size()
            head[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
            self._begins[name], offset = offset, end
        text = json.dumps(head, separators=(",", ":")).encode()
        self._head = text + b" " * (-len(text) % _ALIGNMENT)
        self._missing = set(shapes)

    def __enter__(self) -> "TensorFileWriter":
        self._file: BinaryIO = self._path.open("wb")
        self._file.write(len(self._head).to_bytes(8, "little") + self._head)
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor. Raises: `CheckpointError` if it is not of the shape and dtype that were said."""
        said = self._shapes.get(name)
        if said is None or said.shape != tensor.shape or said.dtype != tensor.dtype:
            raise CheckpointError(f"`{name}` is {tuple(tensor.shape)} {tensor.dtype}, for which `{self._path}` was not laid out: "
                                  "the model changed while it was saved. Save it again.")
        self._file.seek(8 + len(self._head) + self._begins[name])
        memory: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._file.write(memory)
        self._missing.discard(name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if error is None and self._missing:
            raise CheckpointError(f"`{self._path}` lacks {len(self._missing)} tensors, e.g. `{min(self._missing)}`: the model "
                                  "changed while it was saved. Save it again.")


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], *, stream: Stream | None = None, metadata: dict[str, str] | None = None,
) -> None:
    """Write a file of `tensors`; those of them that have no memory come out of `stream`."""
    if stream is None:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
        return
    with TensorFileWriter(path, tensors, metadata=metadata) as writer:
        for name, tensor in tensors.items():
            if tensor.device.type != "meta":
                writer.write(name, tensor)
        for name, tensor in stream:
            writer.write(name, tensor)
