"""From features to the tensors of a micro-batch: collation, the one label shift, micro-batching and packing."""

from twinkle_core.processor.micro_batch import Alternatives, MicroBatch, TokenOutputs
from twinkle_core.processor.processor import InputProcessor, build_processor
from twinkle_core.processor.tokens import Limits

__all__ = ["Alternatives", "InputProcessor", "Limits", "MicroBatch", "TokenOutputs", "build_processor"]
