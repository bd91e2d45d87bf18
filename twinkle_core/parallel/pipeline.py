"""Pipeline parallelism (`pp`): each rank has some of the layers, and micro-batches flow through the ranks.

`torch.distributed.pipelining` runs the schedule (1F1B, Narayanan et al. 2019; interleaved, Narayanan et al. 2021, where a rank
holds `vpp` chunks of layers). Here the layers are cut, and a schedule is made for each shape of batch: all micro-batches of a call
have one shape, and a step of another shape needs new buffers, without which the process is aborted.

Layers keep their numbers as names, so parameters are called as in the whole model. Every stage computes masks and rotary embeddings
itself, and has a copy of the configuration with the per-layer lists cut like the layers: the model's loop indexes them by position.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from twinkle_core.errors import MeshError, ModelError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.parallel.interface import ParallelStrategy
from twinkle_core.parallel.placed import Placed
from twinkle_core.parallel.ranks import Ranks

Compute = Callable[[int, torch.Tensor], torch.Tensor]
"""(index of the micro-batch, hidden states [R, L, D]) -> its loss, a scalar: what the last stage does."""


class PipelineStrategy(ParallelStrategy):
    """`pp`."""

    def check(self, config: Any, mesh: DeviceMesh) -> None:
        """Raise `MeshError` unless every stage gets at least one layer."""
        layers, stages = int(config.get_text_config().num_hidden_layers), mesh.pp * mesh.vpp
        if stages > layers:
            raise MeshError(f"`pp={mesh.pp}` x `vpp={mesh.vpp}` makes {stages} stages, but the model has "
                            f"`num_hidden_layers={layers}`. Use at most {layers} stages.")

    def apply(self, placed: Placed) -> None:
        """Keep this rank's layers, and embedding, norm and output layer where they belong."""
        placed.stages = cut_stages(placed.module, placed.ranks)
        if is_tied(placed.module):
            placed.tied = tied_group(placed.ranks)


class StageModule(nn.Module):
    """One chunk of the layers, between the embedding (first) and the norm (last)."""

    def __init__(self, base: nn.Module, layers: Sequence[str], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        chunk: Any = copy.copy(base)
        chunk.__dict__["_modules"] = dict(base._modules)
        whole: Any = base._modules["layers"]
        chunk._modules["layers"] = _named_list({name: whole._modules[name] for name in layers})
        if not is_last:
            chunk._modules["norm"] = nn.Identity()
        chunk.config = config_of_layers(chunk.config, [int(name) for name in layers])
        self.chunk = chunk

    def forward(self, hidden_or_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        """Return hidden states [R, L, D] of token ids [R, L] (first stage) or of hidden states."""
        name = "input_ids" if self.is_first else "inputs_embeds"
        return self.chunk(**{name: hidden_or_ids}, position_ids=position_ids, use_cache=False).last_hidden_state


def cut_stages(module: Any, ranks: Ranks) -> list[tuple[int, StageModule]]:
    """Drop the layers that other ranks have, in place, and return (stage number, chunk) of what stays."""
    base = module.base_model
    mesh, position = ranks.mesh, ranks.coordinates["pp"]
    names = list(base.layers._modules)
    count = mesh.pp * mesh.vpp
    numbers = [position + mesh.pp * chunk for chunk in range(mesh.vpp)]
    bounds = [len(names) * stage // count for stage in range(count + 1)]
    owned = {stage: names[bounds[stage]:bounds[stage + 1]] for stage in numbers}
    base.layers = _named_list({name: base.layers._modules[name] for stage in numbers for name in owned[stage]})
    stages = [(stage, StageModule(base, owned[stage], is_first=stage == 0, is_last=stage == count - 1)) for stage in numbers]
    if 0 not in numbers and not (count - 1 in numbers and is_tied(module)):
        base.embed_tokens = None
    if count - 1 not in numbers:
        base.norm = nn.Identity()
        if not (0 in numbers and is_tied(module)):
            module.lm_head = nn.Identity()
    return stages


def is_tied(module: Any) -> bool:
    """Whether the output layer has the embedding's weight."""
    return bool(module.config.get_text_config().tie_word_embeddings)


def tied_group(ranks: Ranks) -> Any:
    """Return the group of the first and the last stage of this column; None for a rank between. Every rank must call it."""
    own = None
    for rank in range(ranks.mesh.world_size):
        column = ranks.mesh.group_of(rank, "pp")
        if rank == column[0]:
            group = dist.new_group([column[0], column[-1]])
            if ranks.rank in (column[0], column[-1]):
                own = group
    return own


def _named_list(layers: dict[str, nn.Module]) -> nn.ModuleList:
    named = nn.ModuleList()
    for name, layer in layers.items():
        named._modules[name] = layer  # `add_module` of a list would number them anew
    return named


def config_of_layers(config: Any, layers: Sequence[int]) -> Any:
    """Return a copy of a configuration for these layers only."""
    cut = copy.copy(config)
    count = config.num_hidden_layers
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == count and name.startswith(("layer", "mlp_layer")):
            setattr(cut, name, [value[layer] for layer in layers])
    cut.num_hidden_layers = len(layers)
    return cut


class Pipeline:
    """Runs the micro-batches of a call through the stages."""

    def __init__(self, placed: Placed) -> None:
        self.placed = placed
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._call: _Call | None = None
        self._width = placed.module.config.get_text_config().hidden_size
        self._submodules = {number: _StageRoot(placed.root, chunk) for number, chunk in placed.stages}

    def run(
        self, ids: Sequence[torch.Tensor], positions: Sequence[torch.Tensor | None], compute: Compute, *, is_training: bool,
        dtype: torch.dtype,
    ) -> None:
        """Run micro-batches of one shape [R, L]; the last stage calls `compute` for each, in order, and backward follows.
        """
        self._call = _Call(ids, positions, compute)
        rows, length = ids[0].shape
        schedule = self._schedule(len(ids), rows, length, dtype)
        index = torch.arange(len(ids))
        mesh = self.placed.ranks.mesh
        position = self.placed.ranks.coordinates["pp"]
        arguments = (index,) if position == 0 else ()
        target = index if position == mesh.pp - 1 else None
        if is_training:
            schedule.step(*arguments, target=target, losses=[], return_outputs=False, number=index)
        else:
            schedule.eval(*arguments, target=target, losses=[], return_outputs=False, number=index)
        self._call = None

    def forward(self, chunk: StageModule, argument: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Run one chunk on one micro-batch; called by the schedule through `_StageRoot` and the model's root."""
        call, index = self._call, int(number)
        if call is None:
            raise ModelError("A pipeline stage ran outside a call.")
        hidden = chunk(call.ids[index] if chunk.is_first else argument, call.positions[index])
        return call.compute(index, hidden) if chunk.is_last else hidden

    def _schedule(self, count: int, rows: int, length: int, dtype: torch.dtype) -> Any:
        key = (count, rows, length)
        if key not in self._schedules:
            self._schedules[key] = self._make(count, rows, length, dtype)
        return self._schedules[key]

    def _make(self, count: int, rows: int, length: int, dtype: torch.dtype) -> Any:
        placed = self.placed
        mesh, group = placed.ranks.mesh, placed.ranks.group("pp")
        device = torch.device(placed.ranks.device_type)
        hidden = torch.empty(rows, length, self._width, dtype=dtype, device="meta", requires_grad=True)
        stages: list[Any] = []
        for number, chunk in placed.stages:
            stages.append(PipelineStage(
                self._submodules[number], number, mesh.pp * mesh.vpp, device,
                input_args=(torch.empty(1, dtype=torch.int64, device="meta") if chunk.is_first else hidden,),
                output_args=(torch.empty((), device="meta", requires_grad=True) if chunk.is_last else hidden,), group=group))
        if len(stages) == 1:
            return Schedule1F1B(stages[0], count, loss_fn=_given_loss, scale_grads=False)
        return ScheduleInterleaved1F1B(stages, count, loss_fn=_given_loss, scale_grads=False)


def _given_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return what the last stage computed: the loss itself."""
    return output


class _Call:
    def __init__(self, ids: Sequence[torch.Tensor], positions: Sequence[torch.Tensor | None], compute: Compute) -> None:
        self.ids, self.positions, self.compute = ids, positions, compute


class _StageRoot(nn.Module):
    """What a schedule calls for one stage: the model's root, in whose `forward` FSDP gathers parameters.

    It owns nothing, so that the schedule finds no FSDP module in it and leaves the reduction of gradients to `gradients`.
    """

    def __init__(self, root: nn.Module, chunk: StageModule) -> None:
        super().__init__()
        self._run = functools.partial(root.__call__, chunk)

    def forward(self, argument: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self._run(argument, number)
