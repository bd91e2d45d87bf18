"""The random number generators of one process: Python's, numpy's, torch's on the CPU and on each accelerator."""

import random
from typing import Any

import numpy as np
import torch


def collect_random_state() -> dict[str, Any]:
    """Return the states, in types that `codec` keeps."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": {"kind": kind, "keys": np.asarray(keys, dtype="<u4").tobytes(), "position": int(position),
                  "has_gauss": int(has_gauss), "cached_gaussian": float(cached)},
        "torch": _to_bytes(torch.get_rng_state()),
        "cuda": [_to_bytes(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators. On fewer accelerators than were saved the rest is left out; on more, theirs stay as they are."""
    random.setstate(state["python"])
    legacy = state["numpy"]
    keys = np.frombuffer(legacy["keys"], dtype="<u4").astype(np.uint32)
    np.random.set_state((legacy["kind"], keys, legacy["position"], legacy["has_gauss"], legacy["cached_gaussian"]))
    torch.set_rng_state(_to_tensor(state["torch"]))
    if torch.cuda.is_available():
        for index, saved in enumerate(state["cuda"][:torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_to_tensor(saved), index)


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _to_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8).clone()
