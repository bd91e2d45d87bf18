"""The contract between what sends weights and what receives them.

A source says beforehand what it will send: names and shapes, in order, in buckets of a bounded size. Then it is asked for one
bucket after the other, and a sink is given them in the same order. Both are components, so the calls go wherever they live: in one
process a bucket holds the tensors themselves; on a cluster it is a result that stays where it is and goes from worker to worker.
Nobody holds more than its own part and two buckets.

Names are those of the transformers module without adapters, or, where only an adapter is sent, those of peft's files.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle_core.remote import RemoteComponent, remote_function

if TYPE_CHECKING:
    import torch

BUCKET_BYTES = 64 * 2**20
"""Of a bucket, unless one tensor is larger: large enough that a call costs little beside copying it, small beside any model."""


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """What a source will send.

    Attributes:
        buckets: the names in each bucket, in the order of sending.
        shapes: name -> shape.
        adapter: fields of the peft config of an adapter that is sent alone; None where the model's own weights are sent.
    """

    buckets: tuple[tuple[str, ...], ...]
    shapes: Mapping[str, tuple[int, ...]]
    adapter: Mapping[str, Any] | None = None


class WeightBucket:
    """Tensors by name. Pickled without a copy: their memory travels out of band (pickle protocol 5).

    A receiver copies what it needs and changes nothing in place: the memory may be the sender's.
    """

    def __init__(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        self.tensors = dict(tensors)

    def __reduce__(self) -> Any:
        import torch

        parts = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape),
                        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
                 for name, tensor in self.tensors.items()}
        return _bucket_of, (parts,)


def _bucket_of(parts: Mapping[str, tuple[str, tuple[int, ...], Any]]) -> WeightBucket:
    import warnings

    import torch

    with warnings.catch_warnings():  # torch warns of memory that must not be written to, which nobody does
        warnings.filterwarnings("ignore", message="The given .* is not writable")
        return WeightBucket({name: torch.from_numpy(memory).view(getattr(torch, dtype)).reshape(shape)
                             for name, (dtype, shape, memory) in parts.items()})


def buckets_of(sizes: Mapping[str, int], *, bucket_bytes: int = BUCKET_BYTES) -> tuple[tuple[str, ...], ...]:
    """Return the names of `sizes` (name -> bytes), in order, in buckets of at most `bucket_bytes` unless one alone is larger."""
    buckets: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not buckets or filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return tuple(tuple(names) for names in buckets)


class WeightSource(RemoteComponent):
    """A component that sends weights: a trainable model."""

    @remote_function(dispatch="all", collect="first")
    @abstractmethod
    def plan_weights(self, *, adapter_name: str = "", merge: bool = False, bucket_bytes: int = BUCKET_BYTES) -> WeightPlan:
        """Return what `read_weights` will give: an adapter's own weights, or, with `merge` or without adapters, the model's."""

    @remote_function(dispatch="all", collect="first", lazy_collect=True)
    @abstractmethod
    def read_weights(self, index: int) -> WeightBucket:
        """Return bucket `index` of the last plan, as the weights are now. On several ranks all must be asked."""


class WeightSink(RemoteComponent):
    """A component that receives weights: a sampler."""

    @remote_function(dispatch="all", collect="first", sync=True)
    @abstractmethod
    def begin_weights(self, plan: WeightPlan) -> None:
        """Get ready. Raises: `SamplerError` if the names or shapes do not fit; nothing has changed then."""

    @remote_function(dispatch="all", collect="first", sync=True)
    @abstractmethod
    def write_weights(self, bucket: WeightBucket) -> None:
        """Take one bucket. Until `end_weights` nothing can be sampled."""

    @remote_function(dispatch="all", collect="first", sync=True)
    @abstractmethod
    def end_weights(self) -> None:
        """Use what has come, from the next token on. Raises: `SamplerError` if something is missing."""


def missing_names(plan: WeightPlan, arrived: Sequence[str]) -> list[str]:
    """Return what a plan has and `arrived` lacks."""
    seen = set(arrived)
    return [name for names in plan.buckets for name in names if name not in seen]
