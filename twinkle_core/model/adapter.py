"""The state of what is trained together: one adapter, or the whole model in full-parameter training.

`AdapterState` is where the model, the checkpoints and the services meet. It holds plain references and counters; when they change
is decided in `twinkle_core.model.training`.
"""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from twinkle_core.loss.interface import Loss
    from twinkle_core.metric.interface import Metric
    from twinkle_core.model.forward import MicroResult
    from twinkle_core.model.precision import LossScaler
    from twinkle_core.parallel.placed import Placed
    from twinkle_core.processor import InputProcessor, MicroBatch


@dataclass(kw_only=True)
class Window:
    """What ran since `calculate_metric` was asked last.

    Attributes:
        loss_sum: sum of the loss, of which `count` tokens (or what the loss counts) are the parts.
        num_tokens: supervised tokens.
        tokens_read: all tokens of the sequences, prompts included.
        began_at: `time.perf_counter()` when the first of it began, in seconds; 0.0 when nothing ran.
        ended_at: when the last of it ended.
    """

    loss_sum: float = 0.0
    count: float = 0.0
    num_tokens: int = 0
    tokens_read: int = 0
    began_at: float = 0.0
    ended_at: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether nothing ran."""
        return self.began_at == 0.0

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Note the time, if this is the first that runs; forget it again if the block raises."""
        before = self.began_at
        self.began_at = before or time.perf_counter()
        try:
            yield
        except BaseException:
            self.began_at = before
            raise

    def end(self) -> None:
        """Note the time."""
        self.ended_at = time.perf_counter()

    def add(self, totals: "Totals") -> None:
        """Count a call that ran."""
        self.loss_sum += totals.loss_sum
        self.count += totals.count
        self.num_tokens += totals.num_tokens
        self.tokens_read += totals.tokens_read
        self.end()

    def tokens_per_s(self) -> float:
        """Return all tokens read / wall time."""
        elapsed_s = self.ended_at - self.began_at
        return self.tokens_read / elapsed_s if elapsed_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What the micro-batches of one call came to, over all data ranks.

    Attributes:
        loss_sum: sum of the loss.
        count: by which it is divided.
        num_tokens: supervised tokens.
        tokens_read: all tokens of the sequences.
    """

    loss_sum: float
    count: float
    num_tokens: int
    tokens_read: int

    @property
    def loss(self) -> float:
        """The token mean."""
        return self.loss_sum / self.count if self.count else 0.0


@dataclass(kw_only=True)
class ForwardPass:
    """What `forward` keeps for `calculate_loss` and `backward`: for each micro-batch its loss with the graph."""

    losses: "list[tuple[MicroBatch, torch.Tensor, float]]"
    totals: Totals
    is_consumed: bool = False


@dataclass(kw_only=True)
class AdapterState:
    """Everything that belongs to one adapter.

    Attributes:
        name: the adapter's; "" for the whole model.
        parameters: name in the module -> what is trained. Unchanged as long as the state lives.
        is_lora: whether these are an adapter's parameters.
        gradient_accumulation_steps: backward passes in a said accumulation window.
        optimizer: None until first needed or set.
        scheduler: of the learning rate, or None.
        loss: None means token-mean cross entropy.
        template: makes features of conversations, or None.
        processor: makes micro-batches of features.
        metrics: added ones.
        eval_metrics: the same for `forward_only`.
        scaler: of the loss under fp16, else None.
        micro_steps: backward passes whose gradients are held now.
        rows: row ids of the sequences whose gradients are held.
        grad_count: by which the held gradients, which are sums, are divided at the step.
        step: optimizer steps taken.
        saved_step: `step` at the last save or resume, or None.
        is_lr_step_due: whether the optimizer has stepped since the scheduler advanced.
        grad_norm: global L2 norm at the last clip or step, before clipping; None if there was none.
        is_clipped: whether the gradients held have been clipped, so that their norm is not that any more.
        lr: learning rate of the first group at the last step; None before.
        clip: the norm that the last clip allowed, for people.
        training: what was trained since the last `calculate_metric`.
        evaluation: what `forward_only` ran since then.
        last_metrics: the last answers of `calculate_metric`, by `is_training`.
        pending: the last `forward`.
        is_reduced: whether the gradients held are reduced over the ranks.
        random_states: rank -> state of its generators, in a state that was gathered from several ranks to be saved.
        placed: the ranks that the parameters live on, and what was done to them there; None before the first use.
    """

    name: str
    parameters: "dict[str, torch.nn.Parameter]"
    is_lora: bool
    processor: "InputProcessor"
    gradient_accumulation_steps: int = 1
    optimizer: "torch.optim.Optimizer | None" = None
    scheduler: "torch.optim.lr_scheduler.LRScheduler | None" = None
    loss: "Loss | None" = None
    template: Any = None
    metrics: "list[Metric]" = field(default_factory=list)
    eval_metrics: "list[Metric]" = field(default_factory=list)
    scaler: "LossScaler | None" = None
    micro_steps: int = 0
    rows: list[int | None] = field(default_factory=list)
    grad_count: float = 0.0
    step: int = 0
    saved_step: int | None = None
    is_lr_step_due: bool = False
    grad_norm: float | None = None
    is_clipped: bool = False
    lr: float | None = None
    clip: float = 1.0
    training: Window = field(default_factory=Window)
    evaluation: Window = field(default_factory=Window)
    last_metrics: dict[bool, dict[str, float]] = field(default_factory=dict)
    pending: ForwardPass | None = None
    is_reduced: bool = False
    random_states: dict[int, dict[str, Any]] = field(default_factory=dict)
    placed: "Placed | None" = None

    @property
    def is_window_complete(self) -> bool:
        """Whether as many backward passes as were said have added their gradients."""
        return self.micro_steps >= self.gradient_accumulation_steps

    @property
    def closes_window(self) -> bool:
        """Whether the next backward pass is the last before the step, as far as that was said."""
        return self.micro_steps + 1 >= self.gradient_accumulation_steps

    @property
    def is_alone(self) -> bool:
        """Whether one process holds all of it."""
        return self.placed is None or self.placed.ranks.mesh.world_size == 1

    @contextlib.contextmanager
    def noting(self, *, is_training: bool) -> "Iterator[Callable[[MicroBatch, MicroResult], None]]":
        """Give a function that lets the added metrics see a micro-batch; if the block raises, they have seen none of it."""
        metrics = self.metrics if is_training else self.eval_metrics
        before = copy.deepcopy(metrics)

        def note(batch: "MicroBatch", result: "MicroResult") -> None:
            for metric in metrics:
                metric.accumulate(result.outputs.detached(), batch.targets_BT, **batch.loss_inputs)

        try:
            yield note
        except BaseException:
            metrics[:] = before
            raise

    @contextlib.contextmanager
    def not_counting(self) -> Iterator[None]:
        """Let the added metrics see nothing of an evaluation: what is run says nothing about this state's parameters."""
        metrics, self.eval_metrics = self.eval_metrics, []
        try:
            yield
        finally:
            self.eval_metrics = metrics

    def __deepcopy__(self, memo: dict[int, Any]) -> "AdapterState":
        """Copy the gradients held too, which torch leaves out of a copied parameter, and forget the last `forward`."""
        made = copy.copy(self)
        memo[id(self)] = made
        for name, value in vars(self).items():
            setattr(made, name, None if name == "pending" else copy.deepcopy(value, memo))
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                made.parameters[name].grad = parameter.grad.clone()
        return made

    def discard_gradients(self, *, keep_forward: bool = False) -> None:
        """Forget the gradients held and begin a new window. `keep_forward`: a `forward` may still get its backward pass."""
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.placed is not None:
            self.placed.discard_held()
        self.micro_steps, self.grad_count, self.rows, self.is_reduced, self.is_clipped = 0, 0.0, [], False, False
        if not keep_forward:
            self.pending = None
