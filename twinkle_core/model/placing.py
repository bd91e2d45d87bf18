"""Putting a model on the ranks of its mesh.

Where the mesh cuts parameters (fsdp, tp, pp), the module is hollow until then: adapters are added to it, strategies cut it, and
only then gets each rank memory for its own part, read from the files. Under dp alone a model is loaded as on one device.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from twinkle_core import session
from twinkle_core.errors import ModelError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.model.family import block_classes
from twinkle_core.model.forward import ModuleRunner
from twinkle_core.model.hollow import Source, is_hollow, load_hollow, say_whole
from twinkle_core.model.loading import load_pretrained
from twinkle_core.model.lora import LoraAdapters
from twinkle_core.model.merging import name_in_files
from twinkle_core.model.undo import undone_on_error
from twinkle_core.parallel.choice import parallelize
from twinkle_core.parallel.interface import ParallelStrategy
from twinkle_core.parallel.placed import Placed, part_of
from twinkle_core.parallel.ranks import Ranks

_CUTTING = ("fsdp", "tp", "pp")


def load_for(mesh: DeviceMesh | None, model_id: str, **options: Any) -> tuple[Any, Source | None]:
    """Return the module of `model_id`, and the source of its weights if it is hollow, because `mesh` cuts parameters."""
    if mesh is None or all(getattr(mesh, axis) == 1 for axis in _CUTTING):
        return load_pretrained(model_id, **options), None
    return load_hollow(model_id, **options)


def own_data_rank(mesh: DeviceMesh | None) -> int:
    """Return which slice of the data this process sees, so that data ranks draw different dropout masks and others the same."""
    return 0 if mesh is None or mesh.world_size == 1 else mesh.data_rank(session.current().launcher.topology().rank)


class Placing:
    """A module on its way to its ranks.

    Args:
        module: with weights, or hollow.
        source: of a hollow module's weights, else None.
        mesh: the ranks.
        strategies: axis -> what is done for it, in order.
        device: of this rank.
    """

    def __init__(
        self, module: Any, source: Source | None, *, mesh: DeviceMesh | None, strategies: Mapping[str, ParallelStrategy],
        device: str,
    ) -> None:
        self._module, self._source = module, source
        self._mesh, self._strategies, self._device = mesh, strategies, device

    @property
    def is_hollow(self) -> bool:
        """Whether the module has no weights yet."""
        return self._source is not None

    def place(self, runner: ModuleRunner, lora: LoraAdapters, *, gradient_checkpointing: bool) -> Placed:
        """Cut the module, with the adapters that it has by now, and give this rank its part of the weights."""
        placed = Placed(module=self._module, root=runner.root, is_lora=bool(lora.configs), blocks=block_classes(self._module),
                        ranks=Ranks(self._mesh, device=self._device))
        placed.hidden_dtype = self._module.get_input_embeddings().weight.dtype
        if placed.ranks.size("pp") > 1:
            runner.check_head()
        parallelize(placed, dict(self._strategies), gradient_checkpointing=gradient_checkpointing)
        self._fill(lora, placed)
        return placed

    def fill_whole(self, lora: LoraAdapters, model_id: str, reason: str) -> None:
        """Give a hollow module all of its weights, on every rank, for something that cannot do without, and say so."""
        if self._source is not None:
            say_whole(model_id, reason)
            self._fill(lora, None)

    def patch(self, patch: Callable[[Any], None], lora: LoraAdapters, model_id: str) -> None:
        """Call `patch(module)`, which is undone if it raises.

        Values that a patch computes on a hollow module would be lost: then it is undone, and done again with all weights there.
        """
        watch = _Watch()
        try:
            with undone_on_error(self._module), watch if self.is_hollow else contextlib.nullcontext():
                patch(self._module)
                if watch.has_seen:
                    raise _WeightsNeededError
        except Exception:
            if not watch.has_seen:
                raise
            self.fill_whole(lora, model_id, "`apply_patch` computes with its weights")
            with undone_on_error(self._module):
                patch(self._module)

    def _fill(self, lora: LoraAdapters, placed: Placed | None) -> None:
        if self._source is None:
            return
        made: dict[torch.Tensor, torch.Tensor] = {}  # tied ones are one again
        for held, leaf, name, tensor in _tensors(self._module):
            if is_hollow(tensor):
                if tensor not in made:
                    made[tensor] = _filled(name, tensor, self._source, lora, placed, self._device)
                held[leaf] = made[tensor]
        self._source.weights.close()
        self._source = None


class _WeightsNeededError(Exception):
    """A patch has computed with hollow tensors."""


class _Watch(TorchDispatchMode):
    """Notes whether anything is computed with hollow tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.has_seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            self.has_seen = self.has_seen or any(isinstance(value, torch.Tensor) and is_hollow(value) for value in args)
        return func(*args, **(kwargs or {}))


def _tensors(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, str, torch.Tensor]]:
    """Yield (where it is held, under which key, full name, tensor) of parameters and buffers, tied ones each time."""
    for path, part in module.named_modules():
        for held in (part._parameters, part._buffers):
            for leaf, tensor in list(held.items()):
                if tensor is not None:
                    yield held, leaf, f"{path}.{leaf}" if path else leaf, tensor


def _filled(
    name: str, hollow: torch.Tensor, source: Source, lora: LoraAdapters, placed: Placed | None, device: str,
) -> torch.Tensor:
    """Return this rank's part of a parameter or buffer."""
    start, shape, whole = part_of(name, hollow, placed)
    local = torch.empty(shape, dtype=hollow.dtype, device=device)
    plain = name_in_files(name)
    if plain in source.weights:
        through = source.dtypes.get(plain)
        source.weights.copy(plain, start, local, through=None if through == local.dtype else through)
    else:
        value = lora.start_value(name, whole)
        if value is None:
            raise ModelError(f"`{name}` is in no file of this model, so it has no value. Use a mesh with `dp` only, or give it a "
                             "real tensor where it is added.")
        local.copy_(value[tuple(slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))])
    if isinstance(hollow, DTensor):
        local = DTensor.from_local(local, hollow.device_mesh, hollow.placements, run_check=False, shape=hollow.shape,
                                   stride=hollow.stride())
    return torch.nn.Parameter(local, hollow.requires_grad) if isinstance(hollow, torch.nn.Parameter) else local
