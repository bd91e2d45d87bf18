"""`CheckpointEngineManager`: gives a sampler the weights of a model, wherever both live."""

from typing import Any

from twinkle_core import session
from twinkle_core.errors import ArgumentTypeError, ModeError, check_flag
from twinkle_core.weight_sync.interface import WeightSink, WeightSource


class CheckpointEngineManager:
    """Keeps the weights of a sampler those of a model.

    Args:
        model: what is trained, e.g. a `TransformersModel`.
        sampler: what is sampled from, e.g. a `TorchSampler` of the same base model.

    Raises: `ArgumentTypeError` for something else; `ModeError` under torchrun, where every process has a sampler of its own.
    """

    def __init__(self, *, model: Any, sampler: Any) -> None:
        for name, value, kind in (("model", model, WeightSource), ("sampler", sampler, WeightSink)):
            if not isinstance(value, kind):
                what = "sends weights (`TransformersModel`)" if kind is WeightSource else "receives weights (`TorchSampler`)"
                raise ArgumentTypeError(f"`CheckpointEngineManager({name}=...)` got a `{type(value).__name__}`. Pass a component "
                                        f"that {what}.")
        if session.current().launcher.topology().world_size > 1:
            raise ModeError("`CheckpointEngineManager` in one of several processes that run the same script: each would have a "
                            "sampler of its own. Use `twinkle launch --mode ray`, or one process.")
        self._model, self._sampler = model, sampler

    def sync_weights(self, *, adapter_name: str = "", merge_and_sync: bool = False) -> None:
        """Send the weights; the sampler's next token uses them.

        A model trained in full sends all weights. Of a LoRA the adapter alone is sent, and is what `sample` uses when it is told
        neither `adapter_name` nor `adapter_uri`; with `merge_and_sync` the merged weights are sent and become the sampler's own.

        Raises: `SamplerError` if they do not fit the sampler's model.
        """
        check_flag("merge_and_sync", merge_and_sync)
        plan = self._model.plan_weights(adapter_name=adapter_name, merge=merge_and_sync)
        self._sampler.begin_weights(plan)
        count = len(plan.buckets)
        following = self._model.read_weights(0)
        for index in range(count):
            bucket = following
            following = self._model.read_weights(index + 1) if index + 1 < count else None  # while the sampler copies this one
            self._sampler.write_weights(bucket)
        self._sampler.end_weights()
