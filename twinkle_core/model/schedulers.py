"""The two learning-rate schedules with warmup that fine-tuning uses most.

Both count optimizer steps. `s` is the number of steps taken, `W` `num_warmup_steps`, `T` `num_training_steps`, `m` `min_lr_ratio`;
each parameter group has its own base learning rate. The numbers for `m = 0` are those of transformers'
`get_cosine_schedule_with_warmup` and `get_linear_schedule_with_warmup` up to step `T`; after it the rate stays (transformers'
cosine rises again). Their state is plain numbers, so that a checkpoint keeps
it as JSON.
"""

import math
from abc import abstractmethod

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from twinkle_core.errors import ArgumentError, check_count


class _WarmupScheduler(LRScheduler):
    def __init__(
        self,
        optimizer: Optimizer,
        num_training_steps: int,
        num_warmup_steps: int = 0,
        min_lr_ratio: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        check_count("num_training_steps", num_training_steps, least=1)
        check_count("num_warmup_steps", num_warmup_steps, least=0)
        self.num_training_steps, self.num_warmup_steps = num_training_steps, num_warmup_steps
        if self.num_warmup_steps > self.num_training_steps:
            raise ArgumentError(f"`num_warmup_steps={num_warmup_steps}` is more than `num_training_steps={num_training_steps}`: "
                                "the learning rate would never reach its peak. Use fewer warmup steps.")
        if isinstance(min_lr_ratio, bool) or not isinstance(min_lr_ratio, int | float) or not 0 <= min_lr_ratio <= 1:
            raise ArgumentError(f"`min_lr_ratio={min_lr_ratio!r}`: use a number in [0, 1], the last learning rate / the peak.")
        self.min_lr_ratio = float(min_lr_ratio)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group after `last_epoch` steps."""
        factor = self._factor(self.last_epoch)
        return [base_lr * factor for base_lr in self.base_lrs]

    def _factor(self, step: int) -> float:
        if step < self.num_warmup_steps:
            return step / self.num_warmup_steps
        decay_steps = max(1, self.num_training_steps - self.num_warmup_steps)
        progress = min(1.0, (step - self.num_warmup_steps) / decay_steps)
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * self._decay(progress)

    @abstractmethod
    def _decay(self, progress: float) -> float:
        """Return 1 at progress 0 and 0 at progress 1."""


class CosineWarmupScheduler(_WarmupScheduler):
    """Linear warmup, then half a cosine down to `min_lr_ratio` of the peak, then constant.

        lr(s) = base * s / W                                            for s < W
        lr(s) = base * (m + (1 - m) * (1 + cos(pi * p)) / 2)            for s >= W,   p = min(1, (s - W) / max(1, T - W))

    Source: Loshchilov & Hutter 2017 (SGDR), eq. 5, without restarts.

    Args:
        optimizer: whose learning rates it sets.
        num_training_steps: optimizer steps of the whole run, >= 1.
        num_warmup_steps: of these, how many rise from 0; the first step of all then has learning rate 0.
        min_lr_ratio: last learning rate / peak, in [0, 1].
        last_epoch: steps already taken, minus one; -1 starts.

    Raises: `ArgumentError` for a value out of range.
    """

    def _decay(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


class LinearWarmupScheduler(_WarmupScheduler):
    """Linear warmup, then a straight line down to `min_lr_ratio` of the peak, then constant.

        lr(s) = base * s / W                                            for s < W
        lr(s) = base * (m + (1 - m) * (1 - p))                          for s >= W,   p = min(1, (s - W) / max(1, T - W))

    The arguments are those of `CosineWarmupScheduler`.
    """

    def _decay(self, progress: float) -> float:
        return 1.0 - progress
