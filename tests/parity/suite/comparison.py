"""What a mesh must have in common with one device, and how closely.

Everything is fp32, and other ranks take sums in another order. Losses and norms then differ by up to 2e-6 (measured over 20 steps).
Single gradients are compared with the largest entry of their tensor: a mistake in a small tensor is invisible in the global norm.
`A_log`, `dt_bias` and `in_proj_a` of linear attention have ill-conditioned gradients: on one device fp32 is 1.8e-3 off fp64.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from suite.training import MAX_NORM, Arrays, Outcome

RELATIVE = 1e-5
OF_LARGEST = 1e-4
OF_LARGEST_ILL_CONDITIONED = 5e-3
LOGPROB = 1e-4
LEARNT = 0.8


def differences(found: Sequence[Outcome], expected: Outcome) -> list[str]:
    """Return one line for each quantity in which any rank differs from one device; nothing if all are the same."""
    lines: list[str] = []
    for rank, outcome in enumerate(found):
        own = [*_of_steps(outcome, expected), *_of_tensors("gradient", outcome.gradients, expected.gradients),
               *_of_tensors("parameter", outcome.parameters, expected.parameters)]
        if outcome.steps != found[0].steps:
            own.append("loss or grad_norm: not bit for bit that of rank 0")
        lines += [f"{line} (rank {rank})" for line in own]
    for what in ("gradients", "parameters"):
        lines += _of_names(what, [getattr(outcome, what) for outcome in found], getattr(expected, what))
    return [*lines, *_of_logprobs(found, expected)]


def weaknesses(expected: Outcome) -> list[str]:
    """Return why a run would prove little: gradients that are zero or not clipped, a loss that does not fall by a fifth."""
    lines = [f"The norm at step {step} is {norm}: nothing is clipped" for step, _, norm in expected.steps if norm <= MAX_NORM]
    lines += [f"The gradient of {name} is zero" for name, array in expected.gradients.items() if not array.any()]
    first, last = expected.steps[0][1], expected.steps[-1][1]
    return lines if last <= LEARNT * first else [*lines, f"The loss goes from {first} to {last} only"]


def _of_steps(outcome: Outcome, expected: Outcome) -> Iterator[str]:
    if [step for step, _, _ in outcome.steps] != [step for step, _, _ in expected.steps]:
        yield f"steps: {[step for step, _, _ in outcome.steps]}, not {[step for step, _, _ in expected.steps]}"
        return
    for (step, loss, norm), (_, own_loss, own_norm) in zip(outcome.steps, expected.steps, strict=True):
        for name, value, own in (("loss", loss, own_loss), ("grad_norm", norm, own_norm)):
            if not abs(value - own) <= RELATIVE * abs(own):
                yield f"{name} at step {step}: {value}, not {own}"


def _of_tensors(what: str, found: Arrays, expected: Arrays) -> Iterator[str]:
    for name, array in found.items():
        own = expected.get(name)
        if own is None or own.shape != array.shape:
            yield f"{what} {name}: {array.shape}, not {None if own is None else own.shape}"
            continue
        ratio = float(np.abs(array - own).max()) / max(float(np.abs(own).max()), np.finfo(np.float32).tiny)
        if not ratio <= tolerance(name):
            yield f"{what} {name}: off by {ratio:.1e} of its largest entry"


def _of_names(what: str, found: Sequence[Arrays], expected: Arrays) -> Iterator[str]:
    """All ranks together have every tensor: a pipeline stage has its own."""
    missing = set(expected).difference(*found)
    if missing:
        yield f"{what}: no rank has {sorted(missing)}"


def _of_logprobs(found: Sequence[Outcome], expected: Outcome) -> Iterator[str]:
    """The rows of all data ranks, one behind the other, are those of the batch; ranks of one data rank have the same."""
    slices = sorted({outcome.data_rank for outcome in found})
    for number, own in enumerate(expected.logprobs):
        for column in _columns(found):
            rows = [row for place in slices for row in column[place].logprobs[number]]
            if [len(row) for row in rows] != [len(row) for row in own]:
                yield f"logprobs of batch {number}: rows of {[len(row) for row in rows]} tokens, not {[len(row) for row in own]}"
            elif max(abs(a - b) for row, other in zip(rows, own, strict=True) for a, b in zip(row, other, strict=True)) > LOGPROB:
                yield f"logprobs of batch {number}: more than {LOGPROB} off"


def _columns(found: Sequence[Outcome]) -> list[Mapping[int, Outcome]]:
    """Return one rank of each data rank, in all the ways that use every rank once."""
    by_slice: dict[int, list[Outcome]] = {}
    for outcome in found:
        by_slice.setdefault(outcome.data_rank, []).append(outcome)
    return [dict(zip(by_slice, ranks, strict=True)) for ranks in zip(*by_slice.values(), strict=True)]


def tolerance(name: str) -> float:
    """Return how far a tensor may be off, of its own largest entry."""
    is_ill_conditioned = any(part in name for part in ("A_log", "dt_bias", "in_proj_a"))
    return OF_LARGEST_ILL_CONDITIONED if is_ill_conditioned else OF_LARGEST
