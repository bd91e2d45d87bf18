"""An engine that answers each prompt with its own tokens, last one first."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_core.data_format import SampledSequence, SampleResponse, SamplingParams
from twinkle_core.errors import SamplerError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.remote import remote_function
from twinkle_core.sampler.interface import Sampler


class AcmeSampler(Sampler):
    """Says the tokens of a prompt backwards, each with certainty."""

    def __init__(self, model_id: str, *, remote_group: str | None = None, device_mesh: DeviceMesh | None = None) -> None:
        self.model_id = model_id

    @remote_function(dispatch="slice_dp", collect="flatten")
    def sample(
        self,
        inputs: Sequence[Any],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        adapter_name: str = "",
        adapter_uri: str | None = None,
    ) -> list[SampleResponse]:
        """Return one response an input, in order."""
        if adapter_name or adapter_uri:
            raise SamplerError("`AcmeSampler` has no adapters. Leave `adapter_name` and `adapter_uri` out.")
        params = SamplingParams.of(sampling_params)
        return [SampleResponse(sequences=[_backwards(item["input_ids"], params)] * params.num_samples) for item in inputs]

    @remote_function()
    def set_template(self, template: Any, **options: Any) -> None:
        """Do nothing: this engine reads tokens only."""

    @remote_function()
    def add_adapter_to_sampler(self, adapter_name: str, adapter_uri: str) -> None:
        """Refuse: this engine has no adapters."""
        raise SamplerError(f"`AcmeSampler` has no adapters, so `{adapter_name}` cannot be added.")


def _backwards(prompt: Sequence[int], params: SamplingParams) -> SampledSequence:
    tokens = list(reversed(prompt))[:params.max_tokens]
    return SampledSequence(
        tokens=tokens, logprobs=[0.0] * len(tokens), decoded=" ".join(map(str, tokens)), stop_reason="length",
        new_input_feature={"input_ids": [*prompt, *tokens], "labels": [-100] * len(prompt) + tokens})
