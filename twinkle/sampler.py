"""Samplers: completions of prompts."""

from typing import TYPE_CHECKING

from twinkle_core.sampler.interface import Sampler as Sampler

if TYPE_CHECKING:
    from twinkle_core.sampler.torch_sampler import TorchSampler as TorchSampler
else:
    from twinkle_core.registry import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, kind="samplers")
