"""What `test_saving` runs on every rank: a step, a checkpoint, and what a new model takes out of it; rank 0 prints where it is.

    saving.py FOLDER MODEL...
"""

import argparse
import json
import sys
from typing import Any

import torch
from safetensors import safe_open

import twinkle
from twinkle.model import TransformersModel
from twinkle_core import session
from twinkle_core.model.loading import load_pretrained

LORA = {"r": 4, "target_modules": "all-linear"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("models", nargs="+")
    options = parser.parse_args()
    twinkle.initialize(mode="local")
    found = {f"{model_id}{' lora' * lora}": save(model_id, options.folder, lora=lora)
             for model_id in options.models for lora in (False, True)}
    if session.current().launcher.topology().rank == 0:
        print(json.dumps(found))


def save(model_id: str, folder: str, *, lora: bool) -> str:
    """Train one step, save, and hold the files and a new model that resumes against the model; return the checkpoint."""
    model = build(model_id, lora=lora)
    rank = session.current().launcher.topology().rank
    step(model, rank)
    saved = model.save("lora" if lora else "whole", folder, with_optimizer=True)
    weights = model.get_state_dict()
    other = build(model_id, lora=lora)
    if other.resume_from_checkpoint(saved) != saved:
        sys.exit("not resumed")
    same("weights", other.get_state_dict(), weights)
    moments(model, other)
    third = build(model_id, lora=lora)
    third.load(saved)
    same("loaded weights", third.get_state_dict(), weights)
    if not lora:
        same("one-device load", dict(load_pretrained(saved).state_dict()), weights)
    with safe_open(f"{saved}/{'adapter_model' if lora else 'model'}.safetensors", "pt") as file:
        if lora:
            same("adapter file", {name: file.get_tensor(name) for name in file.keys()}, weights)  # noqa: SIM118
    for _ in range(2):  # and both go on alike
        if step(model, rank) != step(other, rank):
            sys.exit("training went on otherwise")
    return saved


def build(model_id: str, *, lora: bool) -> Any:
    """Return a model, with an adapter if asked, and AdamW."""
    model = TransformersModel(model_id)
    if lora:
        model.add_adapter_to_model("default", LORA)
    model.set_optimizer("AdamW", lr=1e-3)
    return model


def step(model: Any, rank: int) -> float:
    """Train on two rows and return the loss."""
    row = list(range(7, 21))
    output = model.forward_backward(inputs=[{"input_ids": row, "labels": row}, {"input_ids": row[3:], "labels": row[3:]}])
    model.clip_grad_and_step()
    return output["loss"]


def moments(one: Any, other: Any) -> None:
    """Leave unless two models hold the same optimizer state."""
    ours, theirs = one.state(""), other.state("")
    for name, parameter in ours.parameters.items():
        mine, found = ours.optimizer.state[parameter], theirs.optimizer.state[theirs.parameters[name]]
        same(name, {key: local(value) for key, value in found.items()}, {key: local(value) for key, value in mine.items()})
        if {"exp_avg", "exp_avg_sq", "step"} != set(mine):
            sys.exit(f"{name}: AdamW has {set(mine)}")


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part."""
    return getattr(tensor, "to_local", lambda: tensor)()


def same(what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Leave unless two sets of tensors are the same bits under the same names."""
    if found.keys() != expected.keys():
        sys.exit(f"{what}: {found.keys() ^ expected.keys()} differ")
    for name, tensor in expected.items():
        if not torch.equal(found[name], tensor) or found[name].dtype != tensor.dtype:
            sys.exit(f"{what}: `{name}` differs")


if __name__ == "__main__":
    main()
