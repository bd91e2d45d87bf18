"""Checkpoints of a model wherever it lives: on one device as it is; on several ranks by way of the whole model (`whole`).

One rank writes; each reads its own part. What fails on one rank fails on all, so nobody waits.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from twinkle_core.checkpoint.random_state import collect_random_state
from twinkle_core.errors import ModelError
from twinkle_core.model import saving
from twinkle_core.model.streaming import WholeStream
from twinkle_core.model.taking import read_outline, take_optimizer, take_weights
from twinkle_core.model.training_state import optimizer_file
from twinkle_core.model.whole import gather, outline

if TYPE_CHECKING:
    import torch

    from twinkle_core.model.transformers_model import TransformersModel


def save(
    model: "TransformersModel", name: str, output_dir: str, *, adapter_name: str, merge: bool, with_optimizer: bool, **options: Any,
) -> str:
    """Write a checkpoint and return its folder, on every rank. `TrainableModel.save` documents the arguments."""
    state = model.ready(adapter_name)
    if state.placed is None or state.is_alone:
        return saving.save(model, name, output_dir, adapter_name=adapter_name, merge=merge, with_optimizer=with_optimizer,
                           **options)
    if state.micro_steps:
        raise ModelError(f"On several ranks a checkpoint can be saved between steps only, and {state.micro_steps} of "
                         f"{state.gradient_accumulation_steps} backward passes of a step have run. Save after `step()` or "
                         "`clip_grad_and_step()`.")
    ranks = state.placed.ranks
    if merge:
        whole, stream = gather(model, state, keep=ranks.rank == 0), None
    else:
        whole = outline(model, state, with_optimizer=with_optimizer)
        stream = WholeStream(model, state, whole, with_optimizer=with_optimizer)
        whole.chosen.random_states = dict(enumerate(ranks.gather_objects(collect_random_state())))

    def write() -> str:
        if whole is None:
            raise ModelError("Only the first rank writes.")
        try:
            return saving.save(whole, name, output_dir, adapter_name=adapter_name, merge=merge, with_optimizer=with_optimizer,
                               stream=stream, **options)
        finally:  # the others go through all of it, whatever happens here
            if stream is not None:
                stream.drain()

    if stream is not None and ranks.rank:
        stream.drain()
    saved = ranks.on_first(write)
    state.saved_step = state.step
    return saved


def load(model: "TransformersModel", path: str, *, adapter_name: str) -> None:
    """Load weights only."""
    state = model.ready(adapter_name)
    if state.is_alone:
        saving.load(model, path, adapter_name=adapter_name)
        return
    whole = outline(model, state)
    saving.load(whole, path, adapter_name=adapter_name, take=lambda folder: take_weights(folder, whole, model, state))


def resume(model: "TransformersModel", path: str, *, adapter_name: str) -> str | Literal[False]:
    """Load everything that training needs to go on."""
    state = model.ready(adapter_name)
    if state.is_alone:
        return saving.resume(model, path, adapter_name=adapter_name)
    whole = outline(model, state)
    found = saving.resume(whole, path, adapter_name=adapter_name, load=read_outline(whole.chosen.parameters),
                          take=lambda folder: take_weights(folder, whole, model, state))
    if found:
        take_optimizer(optimizer_file(Path(found)), whole.chosen, state)
    return found


def state_dict(model: "TransformersModel", *, adapter_name: str, merge: bool) -> "dict[str, torch.Tensor]":
    """Return name -> tensor of the whole weights, on every rank."""
    state = model.ready(adapter_name)
    whole = model if state.is_alone else gather(model, state)
    return saving.state_dict(whole, adapter_name=adapter_name, merge=merge)
