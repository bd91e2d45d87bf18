"""Models that can be trained."""

from typing import TYPE_CHECKING

from twinkle_core.model.interface import TrainableModel as TrainableModel

if TYPE_CHECKING:
    from twinkle_core.model.transformers_model import TransformersModel as TransformersModel
else:
    from twinkle_core.registry import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, kind="models")
