"""The interface of a sampler."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_core.data_format import SampleResponse, SamplingParams
from twinkle_core.remote import RemoteComponent, remote_function


class Sampler(RemoteComponent):
    """Draws completions. A constructor takes `(model_id, *, ..., remote_group=None, device_mesh=None)`."""

    @remote_function(dispatch="slice_dp", collect="flatten")
    @abstractmethod
    def sample(
        self,
        inputs: Sequence[Any],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        adapter_name: str = "",
        adapter_uri: str | None = None,
    ) -> list[SampleResponse]:
        """Return one response an input, in order.

        Args:
            inputs: features (`input_ids`, as `encode(add_generation_prompt=True)` makes them), or conversations once a template
                is set.
            sampling_params: how to sample.
            adapter_name: an adapter that was added to the sampler; "" means the base model, or the adapter that was
                synchronised last.
            adapter_uri: a checkpoint that `save` returned; it is loaded anew when its content has changed.

        Raises: `SamplerError` if the adapter cannot be used; never samples from another model instead.
        """

    @remote_function(lazy_collect=False)
    @abstractmethod
    def set_template(self, template: Any, **options: Any) -> None:
        """Set the template that turns conversations into prompts."""

    @remote_function(lazy_collect=False)
    @abstractmethod
    def add_adapter_to_sampler(self, adapter_name: str, adapter_uri: str) -> None:
        """Load the adapter of a checkpoint under a name. Raises: `SamplerError` if names or shapes do not match."""
