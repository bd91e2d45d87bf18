"""Which dtype weights and arithmetic have, and the loss scale of fp16.

Left alone: frozen weights as in the checkpoint, trainable ones fp32; arithmetic in the frozen weights' dtype under LoRA and in
fp32 in full-parameter training.
"""

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from twinkle_core.errors import ArgumentError, ArgumentTypeError, ModelError, did_you_mean, listing

MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {"no", *MIXED}
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64,
          "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def resolve_dtype(value: Any) -> torch.dtype | None:
    """Return the dtype that `dtype=` means: None, a `torch.dtype`, or a name such as "bfloat16" or "bf16"."""
    if value is None or (isinstance(value, torch.dtype) and value in SHORT):
        return value
    if isinstance(value, str):
        if value.removeprefix("torch.") in DTYPES:
            return DTYPES[value.removeprefix("torch.")]
        raise ArgumentError(f"`dtype={value!r}` is not a dtype for weights.{did_you_mean(value, DTYPES)} Use one of: "
                            f"{listing(DTYPES)}, or None for the checkpoint's own.")
    raise ArgumentTypeError(f"`dtype={value!r}` is of type {type(value).__name__}. Use a floating `torch.dtype`, one of "
                            f"{listing(DTYPES)}, or None.")


def check_mixed_precision(value: object) -> None:
    """Raise `ArgumentError` unless `value` is None or a known name."""
    if value is not None and (not isinstance(value, str) or value not in NAMES):
        raise ArgumentError(f"`mixed_precision={value!r}` is not allowed. Use one of: {listing(NAMES)}, or None: fp32 in "
                            "full-parameter training, the frozen weights' dtype under LoRA.")


def check_trained_dtype(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise `ModelError` for float16 weights: optimizers divide by numbers that are 0 in float16, and the weights become NaN."""
    if any(parameter.dtype == torch.float16 for parameter in parameters):
        raise ModelError("The weights to train are float16, whose range is too small for an optimizer: they would be NaN after one "
                         "step. Leave `dtype` out and compute in float16 with `mixed_precision=\"fp16\"`, or add a LoRA, which is "
                         "fp32 on a float16 model.")


class Precision:
    """The dtypes of one model.

    Attributes:
        arithmetic: dtype that matrix products are computed in.
        dtype: what the user said of the weights, or None.
    """

    def __init__(
        self, module: torch.nn.Module, *, dtype: torch.dtype | None, mixed_precision: str | None, device_type: str,
    ) -> None:
        self.dtype, self.mixed_precision, self.device_type = dtype, mixed_precision, device_type
        self._module = module
        self._loaded: list[tuple[torch.nn.Parameter, torch.dtype]] = []
        self.arithmetic = weights_dtype(module)
        self._autocast = False

    def use_full(self) -> None:
        """Train every weight: in fp32 unless a dtype was said, and compute in fp32 unless mixed precision was."""
        if self.dtype is None:
            self._widen()
        self._settle(weights_dtype(self._module))

    def use_lora(self) -> None:
        """Freeze the weights as the checkpoint has them, and compute in their dtype unless mixed precision says otherwise."""
        if self.mixed_precision == "no" and self.dtype is None:
            self._widen()
        elif self._loaded:
            for parameter, dtype in self._loaded:
                parameter.data = parameter.data.to(dtype)
            self._loaded = []
        self._settle(weights_dtype(self._module))

    @property
    def is_autocast(self) -> bool:
        """Whether matrix products are computed in another dtype than the weights have."""
        return self._autocast

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that the model runs in."""
        if not self._autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.arithmetic)

    def needs_scaler(self) -> bool:
        """Whether gradients may be lost below the range of fp16."""
        return self.arithmetic == torch.float16

    def keep_widened(self) -> None:
        """Forget the checkpoint's dtypes: the weights have been trained, and rounding them would lose that."""
        self._loaded = []

    def _settle(self, weights: torch.dtype) -> None:
        self.arithmetic = MIXED.get(self.mixed_precision or "no", weights)
        trains_wider = any(p.requires_grad and p.dtype != self.arithmetic for p in self._module.parameters())
        self._autocast = self.arithmetic in MIXED.values() and (trains_wider or weights != self.arithmetic)

    def _widen(self) -> None:
        """Make 16-bit weights fp32 in place, so that ties and references stay. Buffers keep their dtype."""
        for parameter in self._module.parameters():
            if parameter.dtype in MIXED.values():
                self._loaded.append((parameter, parameter.dtype))
                parameter.data = parameter.data.float()


def weights_dtype(module: torch.nn.Module) -> torch.dtype:
    """Return the dtype of most weights that are not an adapter's."""
    sizes: dict[torch.dtype, int] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and "lora_" not in name:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.float32


@dataclass(kw_only=True)
class LossScaler:
    """The factor on the loss that keeps fp16 gradients above the smallest number fp16 has.

    A step whose gradients overflow is skipped and halves the scale; `growth_interval` good ones in a row double it. Our losses
    are sums over tokens, not means, so the scale begins lower than elsewhere. Source: Micikevicius et al. 2018, sec. 3.2.
    """

    scale: float = 1024.0
    growth_interval: int = 1000
    good_steps: int = 0

    def update(self, *, overflowed: bool) -> None:
        """Take in whether a step's gradients overflowed."""
        if overflowed:
            self.scale, self.good_steps = max(self.scale / 2, 2.0 ** -14), 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale, self.good_steps = min(self.scale * 2, 2.0 ** 24), 0
