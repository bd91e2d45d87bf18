"""What `test_loading` runs on every rank: models are loaded on the mesh, as a whole and with an adapter, and compared with
one-device loading. Rank 0 prints what it saw, as JSON.

    loading.py MODEL...
"""

import argparse
import json
import sys
from typing import Any

import torch

import twinkle
from twinkle.model import TransformersModel
from twinkle_core import session
from twinkle_core.model.loading import load_pretrained
from twinkle_core.model.lora import LoraAdapters, lora_config
from twinkle_core.parallel.gathering import whole_tensor

LORA = {"r": 4, "target_modules": "all-linear", "modules_to_save": ["norm"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    options = parser.parse_args()
    twinkle.initialize(mode="local")
    seen = {model_id: [compare(model_id, lora=lora) for lora in (False, True)] for model_id in options.models}
    if session.current().launcher.topology().rank == 0:
        print(json.dumps(seen))


def compare(model_id: str, *, lora: bool) -> dict[str, Any]:
    """Return how many tensors were compared over all ranks, and how many bytes this rank holds."""
    model = TransformersModel(model_id)
    is_hollow = all(parameter.is_meta for parameter in model.module.parameters())
    alone = load_pretrained(model_id)
    if lora:
        model.add_adapter_to_model("default", LORA)
        LoraAdapters(alone, device="cpu").add("default", lora_config(LORA))
    else:
        for parameter in alone.parameters():  # trained in full, so in fp32
            parameter.data = parameter.data.float()
    state = model.ready("")
    placed = state.placed
    if placed is None:
        sys.exit("the model is on no ranks")
    expected, buffers = dict(alone.named_parameters(remove_duplicate=False)), dict(alone.named_buffers())
    names: set[str] = set()
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        names.add(name)
        check(name, whole_tensor(placed, name, parameter.detach()), expected[name])
        if parameter.requires_grad != expected[name].requires_grad:
            sys.exit(f"{name}: requires_grad {parameter.requires_grad}")
    for name, buffer in model.module.named_buffers():
        check(name, buffer, buffers[name])
        names.add(name)
    held = {id(parameter): parameter for parameter in model.module.parameters()}.values()
    union = set().union(*placed.ranks.gather_objects(names))
    if union != set(expected) | set(buffers):
        sys.exit(f"{model_id}: {union ^ (set(expected) | set(buffers))} are on no rank, or on one only")
    if not placed.stages and is_tied(alone) != is_tied(model.module):
        sys.exit(f"{model_id}: ties differ")
    return {"compared": len(union), "buffers": len(buffers), "is_hollow": is_hollow,
            "held": sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in held),
            "of": sum(p.numel() for p in alone.parameters())}


def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Leave unless two tensors are the same bits."""
    if found.dtype != expected.dtype or found.shape != expected.shape or not torch.equal(found, expected):
        sys.exit(f"{name} differs from one-device loading: {found.dtype} {tuple(found.shape)}, there {expected.dtype} "
                 f"{tuple(expected.shape)}")


def is_tied(module: Any) -> bool:
    """Return whether embedding and output layer are one parameter."""
    return module.get_input_embeddings().weight is module.get_output_embeddings().weight


if __name__ == "__main__":
    main()
