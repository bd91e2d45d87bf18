"""Advantages relative to the group of answers to one prompt."""

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from twinkle_core.advantage.interface import Advantage
from twinkle_core.errors import ArgumentError, DataError, check_count, checks_keywords, did_you_mean, listing

Scale = Literal["group", "batch", "none"]

_EQUAL = 1e-9
"""Rewards that differ by less, relative to the largest, are the same number added up in another order."""


class GRPOAdvantage(Advantage):
    """The reward minus its group's mean, divided by a standard deviation; a group of equal rewards gets 0.

    Source: Shao et al. 2024, DeepSeekMath, sec. 4.1.2.

    Args:
        scale: by what is divided. "group": the standard deviation of the group (of all its members: divided by n, not n - 1).
            "batch": that of all these rewards (Hu 2025, REINFORCE++). "none": nothing (Liu et al. 2025, Dr. GRPO,
            sec. 3.2).
    """

    @checks_keywords
    def __init__(self, scale: Scale = "group") -> None:
        if scale not in get_args(Scale):
            raise ArgumentError(f"`scale={scale!r}`: use one of {listing(get_args(Scale))}."
                                f"{did_you_mean(str(scale), get_args(Scale))}")
        self.scale: Scale = scale

    def __call__(self, rewards: Sequence[float], *, num_generations: int) -> list[float]:
        """Return one advantage a sequence, in order."""
        groups = _groups(rewards, num_generations, least=1)
        centred = _centred(groups)
        if self.scale == "group":
            centred = _divided(centred, groups.std(axis=1, keepdims=True))
        elif self.scale == "batch" and groups.size:
            centred = _divided(centred, groups.std(keepdims=True))
        return centred.reshape(-1).tolist()


class RLOOAdvantage(Advantage):
    """The reward minus the mean of the other answers to the same prompt.

    Source: Ahmadian et al. 2024, "Back to basics" (RLOO, the leave-one-out estimator of Kool et al. 2019).
    """

    def __call__(self, rewards: Sequence[float], *, num_generations: int) -> list[float]:
        """Return one advantage a sequence, in order. `num_generations` is at least 2."""
        centred = _centred(_groups(rewards, num_generations, least=2))
        return (centred * (num_generations / (num_generations - 1))).reshape(-1).tolist()


def _groups(rewards: Any, num_generations: int, *, least: int) -> npt.NDArray[np.float64]:
    """Return rewards as [prompts, answers]."""
    check_count("num_generations", num_generations, least=least)
    try:
        numbers = np.asarray(rewards, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"`rewards` holds something that is no number: {error}. Pass one number a sequence.") from error
    if numbers.ndim != 1:
        raise DataError(f"`rewards` has the shape {numbers.shape}. Pass one list with one number a sequence, the answers to one "
                        "prompt beside each other.")
    if not np.isfinite(numbers).all():
        index = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise DataError(f"`rewards[{index}]` is {numbers[index]}. Rewards are finite numbers.")
    if len(numbers) % num_generations:
        raise DataError(f"`rewards` has {len(numbers)} entries, which `num_generations={num_generations}` does not divide. Pass "
                        "the rewards of whole groups: `num_generations` answers to each prompt.")
    return numbers.reshape(-1, num_generations)


def _centred(groups: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return rewards minus their group's mean, exactly 0 where all of a group are the same."""
    if not groups.size:
        return groups
    spread = groups.max(axis=1, keepdims=True) - groups.min(axis=1, keepdims=True)
    is_same = spread <= _EQUAL * np.abs(groups).max(axis=1, keepdims=True)
    return np.where(is_same, 0.0, groups - groups.mean(axis=1, keepdims=True))


def _divided(centred: npt.NDArray[np.float64], deviation: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return centred / np.where(deviation > 0, deviation, math.inf)
