"""Log-probabilities of targets from hidden states and the head's weight, without holding the logits of all positions.

Only supervised positions come here, and they go through the head in chunks: at any time there are the logits of one chunk in
fp32. The gradients:

* where the loss says beforehand that it has one gradient g for every token (cross entropy: -1), the chunk's gradients are computed
  while its logits are there: the three matrix products of plain cross entropy, nothing twice;
* where the head is frozen, d logprob / d hidden is kept, [N, D], and scaled in the backward pass;
* else the backward pass computes each chunk's logits again.

Where the head is cut by vocabulary over ranks (tp), each rank has the logits of its tokens: the ranks exchange a maximum, a sum and
the target's logit a position, and add the gradients to hidden; logits never travel.

Notation: N supervised positions, D width, V vocabulary, C positions of a chunk.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch

CHUNK_ELEMENTS = 2 ** 25
"""Logits held at once: 128 MiB in fp32, small beside the gradient of a large head, and still 220 rows for a vocabulary of 152k, so
that the matrix products are efficient."""

Gradients = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class Head(NamedTuple):
    """A linear head: logits = softcap(hidden @ weight.T + bias).

    Attributes:
        weight: [V, D].
        bias: [V] or None.
        softcap: c of c * tanh(logits / c), or None.
        group: the ranks over which the vocabulary is cut, in equal parts; None: it is whole.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    softcap: float | None = None
    group: Any = None


def token_logprobs(
    hidden_nd: torch.Tensor,
    head: Head,
    targets_n: torch.Tensor,
    *,
    expected_gradient: float | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each target, [N] in fp32 (or fp64), and whether it is the likeliest token, [N].

    Args:
        hidden_nd: [N, D]; under autocast computed in its dtype.
        head: the head.
        targets_n: [N] token ids.
        expected_gradient: the gradient that every log-probability will get, if that is known. Another one is right too, but slower.
        chunk_elements: of logits held at once.
    """
    if torch.is_autocast_enabled(hidden_nd.device.type):
        dtype = torch.get_autocast_dtype(hidden_nd.device.type)
    else:
        dtype = head.weight.dtype
    chunk = max(1, chunk_elements // head.weight.shape[0])
    needs_gradient = torch.is_grad_enabled() and (hidden_nd.requires_grad or head.weight.requires_grad)
    result = _TokenLogprobs.apply(hidden_nd, head.weight, head.bias, targets_n, (head.softcap, head.group, chunk, dtype),
                                  expected_gradient if needs_gradient else None, needs_gradient)
    return cast("tuple[torch.Tensor, torch.Tensor]", result)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_nd: torch.Tensor, weight_vd: torch.Tensor, bias_v: torch.Tensor | None, targets_n: torch.Tensor,
        settings: tuple[Any, ...], expected: float | None, needs_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(hidden_nd.device.type, enabled=False):
            work = _Work(hidden_nd, weight_vd, bias_v, targets_n, settings)
            is_frozen = not weight_vd.requires_grad and (bias_v is None or not bias_v.requires_grad)
            ctx.is_frozen, ctx.settings, ctx.expected, ctx.gradients = is_frozen, settings, expected, None
            gradient: float | None = 1.0 if is_frozen and needs_gradient else expected
            logprobs_n, is_top_n, gradients = work.run(gradient, with_weight=not is_frozen)
        if needs_gradient:
            ctx.save_for_backward(hidden_nd, weight_vd, bias_v, targets_n)
            ctx.gradients = gradients
        ctx.mark_non_differentiable(is_top_n)
        return logprobs_n, is_top_n

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        gradient_n = grad_outputs[0]
        hidden_nd, weight_vd, bias_v, targets_n = ctx.saved_tensors
        nothing = (None,) * 4
        if ctx.is_frozen:
            grad_hidden = ctx.gradients[0] * gradient_n[:, None].to(ctx.gradients[0].dtype)
            return (grad_hidden.to(hidden_nd.dtype), None, None, *nothing)
        if ctx.gradients is not None and gradient_n.numel() and bool((gradient_n == ctx.expected).all()):
            gradients, ctx.gradients = ctx.gradients, None  # handed over: a second backward pass computes them again
        else:
            work = _Work(hidden_nd, weight_vd, bias_v, targets_n, ctx.settings)
            gradients = work.run(gradient_n, with_weight=True)[2]
        grad_hidden, grad_weight, grad_bias = cast(Gradients, gradients)
        return (grad_hidden.to(hidden_nd.dtype) if ctx.needs_input_grad[0] else None, grad_weight, grad_bias, *nothing)


class _Work:
    """One pass over the chunks."""

    def __init__(
        self, hidden_nd: torch.Tensor, weight_vd: torch.Tensor, bias_v: torch.Tensor | None, targets_n: torch.Tensor,
        settings: tuple[Any, ...],
    ) -> None:
        self.softcap, self.group, self.chunk, dtype = settings
        self.hidden_nd, self.targets_n = hidden_nd.detach().to(dtype), targets_n
        self.weight_vd = weight_vd.detach().to(dtype)
        self.bias_v = None if bias_v is None else bias_v.detach().to(dtype)
        self.weight_dtype = weight_vd.dtype

    def run(
        self, gradient: torch.Tensor | float | None, *, with_weight: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, Gradients | None]:
        """Return (logprobs [N], is_top [N], gradients of sum(gradient * logprobs))."""
        count, device = self.hidden_nd.shape[0], self.hidden_nd.device
        wide = torch.float64 if self.hidden_nd.dtype == torch.float64 else torch.float32
        logprobs_n = torch.empty(count, dtype=wide, device=device)
        is_top_n = torch.empty(count, dtype=torch.bool, device=device)
        grad_hidden = grad_weight = grad_bias = None
        if gradient is not None:
            grad_hidden = torch.empty_like(self.hidden_nd)
            if with_weight:
                grad_weight = torch.zeros_like(self.weight_vd, dtype=self.weight_dtype)
                grad_bias = None if self.bias_v is None else torch.zeros_like(self.bias_v, dtype=self.weight_dtype)
        for rows in self._chunks(count):
            logits_cv, slope_cv = self._logits(rows, wide, with_slope=gradient is not None)
            normalise = self._normalise if self.group is None else self._normalise_cut
            logprobs_n[rows], is_top_n[rows], log_softmax_cv, own_c1, minus_c1 = normalise(logits_cv, self.targets_n[rows])
            del logits_cv
            if gradient is None:
                continue
            delta_cv = log_softmax_cv.exp_()
            delta_cv.scatter_add_(1, own_c1, minus_c1)  # p - onehot
            if isinstance(gradient, torch.Tensor):
                delta_cv.mul_(-gradient[rows, None])
            elif gradient != -1.0:
                delta_cv.mul_(-gradient)
            if slope_cv is not None:
                delta_cv.mul_(slope_cv)
            delta_cv = delta_cv.to(self.hidden_nd.dtype)
            cast(torch.Tensor, grad_hidden)[rows] = delta_cv @ self.weight_vd
            if grad_weight is not None:
                _add_product(grad_weight, delta_cv, self.hidden_nd[rows])
            if grad_bias is not None:
                grad_bias += delta_cv.sum(0, dtype=wide).to(grad_bias.dtype)
        if grad_hidden is not None and self.group is not None:
            torch.distributed.all_reduce(grad_hidden, group=self.group)
        gradients = None if grad_hidden is None else (grad_hidden, grad_weight, grad_bias)
        return logprobs_n, is_top_n, gradients

    def _normalise(self, logits_cv: torch.Tensor, targets_c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return (logprobs [C], is_top [C], log-softmax [C, V], column of the target [C, 1], -1 [C, 1])."""
        log_softmax_cv = torch.log_softmax(logits_cv, -1)
        targets_c1 = targets_c[:, None]
        logprobs_c = log_softmax_cv.gather(1, targets_c1)[:, 0]
        is_top_c = logprobs_c >= log_softmax_cv.amax(-1)
        return logprobs_c, is_top_c, log_softmax_cv, targets_c1, torch.full_like(targets_c1, -1, dtype=logits_cv.dtype)

    def _normalise_cut(self, logits_cv: torch.Tensor, targets_c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the same for this rank's part of the vocabulary; where it lacks the target, the last entry is 0."""
        tokens = logits_cv.shape[1]
        column_c = targets_c - tokens * torch.distributed.get_rank(self.group)
        is_own_c = (column_c >= 0) & (column_c < tokens)
        column_c1 = column_c.clamp(0, tokens - 1)[:, None]
        top_c = logits_cv.amax(-1)
        torch.distributed.all_reduce(top_c, op=torch.distributed.ReduceOp.MAX, group=self.group)
        target_c = logits_cv.gather(1, column_c1)[:, 0] * is_own_c
        sums_2c = torch.stack([torch.exp(logits_cv - top_c[:, None]).sum(-1), target_c])
        torch.distributed.all_reduce(sums_2c, group=self.group)
        normaliser_c = top_c + sums_2c[0].log()
        minus_c1 = -is_own_c[:, None].to(logits_cv.dtype)
        return sums_2c[1] - normaliser_c, sums_2c[1] >= top_c, logits_cv - normaliser_c[:, None], column_c1, minus_c1

    def _chunks(self, count: int) -> Iterator[slice]:
        pieces = -(-count // self.chunk)
        for piece in range(pieces):  # of equal size: a last chunk of a few rows is slow
            yield slice(count * piece // pieces, count * (piece + 1) // pieces)

    def _logits(self, rows: slice, wide: torch.dtype, *, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits_cv = torch.nn.functional.linear(self.hidden_nd[rows], self.weight_vd, self.bias_v).to(wide)
        if self.softcap is None:
            return logits_cv, None
        tanh_cv = torch.tanh(logits_cv / self.softcap)
        return tanh_cv * self.softcap, (1 - tanh_cv * tanh_cv) if with_slope else None


def _add_product(grad_weight_vd: torch.Tensor, delta_cv: torch.Tensor, hidden_cd: torch.Tensor) -> None:
    if grad_weight_vd.dtype == delta_cv.dtype:
        grad_weight_vd.addmm_(delta_cv.T, hidden_cd)
    else:
        grad_weight_vd += delta_cv.T @ hidden_cd
