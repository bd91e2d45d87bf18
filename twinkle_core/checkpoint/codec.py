"""Python state as JSON and torch state as safetensors, both exactly, without pickle.

JSON has no tuples, no keys but strings, no infinities and no tensors; these are kept under a key that begins with `$`. What
cannot be kept exactly is an error when it is saved, never when it is loaded.
"""

import base64
import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from twinkle_core.errors import CheckpointError

MAX_JSON_TENSOR = 4096
"""Elements of a tensor that is kept in JSON; state as large as a parameter belongs in safetensors."""


def write_json(path: Path, value: Any, *, what: str) -> None:
    """Write `value`. Raises: `CheckpointError` naming the part of `what` that JSON cannot hold."""
    path.write_text(json.dumps(encode(value, what), indent=1, allow_nan=False), "utf-8")


def read_json(path: Path) -> Any:
    """Return what `write_json` wrote. Raises: `CheckpointError` naming the file."""
    try:
        return decode(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise CheckpointError(f"`{path}` cannot be read: {error}. The checkpoint is damaged; use another one.") from error


def encode(value: Any, where: str) -> Any:
    """Return `value` in JSON's own types. `where` names the value in an error."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) is list:
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Counter):
        return {"$counter": _items(value, where)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {"$dict": _items(value, where)}
    if isinstance(value, torch.Tensor) and value.numel() <= MAX_JSON_TENSOR and not value.is_complex():
        exact = value.detach().cpu()
        return {"$tensor": encode(exact.tolist(), where), "dtype": str(exact.dtype).removeprefix("torch.")}
    raise CheckpointError(f"`{where}` is a {type(value).__name__}, which a checkpoint cannot hold: it is kept as JSON, without "
                          "pickle. Use numbers, text, lists, dicts and small tensors in its state.")


def decode(value: Any) -> Any:
    """Return what `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(decode(item) for item in value["$tuple"])
    if "$bytes" in value:
        return base64.b64decode(value["$bytes"])
    if "$tensor" in value:
        return torch.tensor(decode(value["$tensor"]), dtype=getattr(torch, value["dtype"]))
    if "$counter" in value:
        return Counter({decode(key): decode(item) for key, item in value["$counter"]})
    if "$dict" in value:
        return {decode(key): decode(item) for key, item in value["$dict"]}
    return {key: decode(item) for key, item in value.items()}


def _items(value: Mapping[Any, Any], where: str) -> list[list[Any]]:
    return [[encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
