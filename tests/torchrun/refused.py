"""What the torchrun tests run on two ranks to see what is refused: prints a JSON object, case -> error.

    refused.py FOLDER OF MODELS | --initialize
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import twinkle
from twinkle import DeviceMesh

refused: dict[str, str] = {}


def attempt(case: str, act: Callable[[], Any]) -> None:
    try:
        act()
    except ValueError as error:
        refused[case] = f"{type(error).__name__}: {error}"


attempt("script", lambda: twinkle.initialize(mode="local", global_device_mesh=DeviceMesh.from_sizes(fsdp_size=3)))
attempt("command line", lambda: twinkle.initialize(mode="local", global_device_mesh=DeviceMesh.from_sizes(pp_size=2)))
if sys.argv[1] != "--initialize":
    import torch.distributed as dist

    from twinkle.model import TransformersModel

    def build(model: str, **sizes: int) -> None:
        TransformersModel(f"{sys.argv[1]}/{model}", device="cpu", device_mesh=DeviceMesh.from_sizes(**sizes))

    twinkle.initialize(mode="local")
    attempt("component", lambda: build("heads", dp_size=4))
    for name in ("heads", "kv_heads", "vocabulary"):
        attempt(name, lambda name=name: build(name, tp_size=2))
    attempt("layers", lambda: build("heads", pp_size=2, vpp_size=2))
    refused["waiting"] = str(dist.is_initialized())
print(json.dumps(refused))
