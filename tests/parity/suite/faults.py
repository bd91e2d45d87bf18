"""Mistakes that are easily made in parallel training, put in by hand: most leave the loss as it is for a step.

Each is a silent one that was met in earnest, with torch or transformers on CPUs. The comparison must find every one of them.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B

from twinkle_core.model.placing import Placing
from twinkle_core.parallel import pipeline, tensor
from twinkle_core.parallel.placed import Placed


@contextlib.contextmanager
def put_in(name: str) -> Iterator[None]:
    """Work with the fault `name` inside the block; "" is none."""
    with FAULTS[name]() if name else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _replaced(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, before)


def _after_tensor_cut(change: Callable[[Placed], None]) -> Any:
    apply = tensor.TensorStrategy.apply

    def apply_and_change(self: Any, placed: Placed) -> None:
        apply(self, placed)
        change(placed)

    return _replaced(tensor.TensorStrategy, "apply", apply_and_change)


def untied_head() -> Any:
    """The output layer is no longer the embedding after tp has cut both, as transformers' own tensor parallelism leaves it."""
    def untie(placed: Placed) -> None:
        head = placed.module.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())

    return _after_tensor_cut(untie)


def reduced_in_every_backward() -> Any:
    """Gradients of q_norm and k_norm are added over tp in each backward pass, as `replicated_with_grad_allreduce` does."""
    def reduce_at_once(placed: Placed) -> None:
        group = placed.ranks.group("tp")

        def add(parameter: torch.nn.Parameter) -> None:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)

        for name in placed.cut.partial:
            placed.module.get_parameter(name).register_post_accumulate_grad_hook(add)
        placed.cut.partial.clear()

    return _after_tensor_cut(reduce_at_once)


def never_reduced() -> Any:
    """Gradients of q_norm and k_norm are not added over tp at all: 0.3 % of the global norm."""
    return _after_tensor_cut(lambda placed: placed.cut.partial.clear())


@contextlib.contextmanager
def scaled_gradients() -> Iterator[None]:
    """The schedule divides gradients by the number of micro-batches, as torch's default is, of the parameters that it can see."""
    def schedule(stage: Any, count: int, **options: Any) -> Any:
        return Schedule1F1B(stage, count, **{**options, "scale_grads": True})

    class SeenRoot(pipeline._StageRoot):
        def __init__(self, root: torch.nn.Module, chunk: Any) -> None:
            super().__init__(root, chunk)
            self.chunk = chunk

    with _replaced(pipeline, "Schedule1F1B", schedule), _replaced(pipeline, "_StageRoot", SeenRoot):
        yield


def uncut_layer_types() -> Any:
    """A stage's configuration keeps the list of all layers, so that its first layer takes the mask of the model's first."""
    def keep_lists(config: Any, layers: Any) -> Any:
        kept = copy.copy(config)
        kept.num_hidden_layers = len(layers)
        return kept

    return _replaced(pipeline, "config_of_layers", keep_lists)


def garbage_in_buffers() -> Any:
    """Buffers that no file holds are left as they come out of memory after `to_empty`."""
    place = Placing.place

    def place_with_garbage(*args: Any, **options: Any) -> Placed:
        placed = place(*args, **options)
        frequencies = placed.module.base_model.rotary_emb.inv_freq
        frequencies.copy_(torch.rand(frequencies.shape, generator=torch.Generator().manual_seed(5)))
        return placed

    return _replaced(Placing, "place", place_with_garbage)


FAULTS: dict[str, Callable[[], Any]] = {made.__name__: made for made in (
    untied_head, reduced_in_every_backward, never_reduced, scaled_gradients, uncut_layer_types, garbage_in_buffers)}
