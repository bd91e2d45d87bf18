"""`TorchSampler`: sampling with PyTorch and transformers alone, on whatever device there is.

It turns inputs into prompts, batches them, chooses the model (the base, or an adapter merged into a copy) and makes responses
of what `decoding` returns. It holds the whole model on each rank; other ranks sample other prompts.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle_core import registry, session
from twinkle_core.data_format import SampledSequence, SampleResponse, SamplingParams
from twinkle_core.errors import ArgumentError, HubError, MeshError, SamplerError, TemplateError, check_count
from twinkle_core.mesh import DeviceMesh
from twinkle_core.model.loading import load_pretrained
from twinkle_core.model.precision import resolve_dtype
from twinkle_core.platforms.choice import choose_device
from twinkle_core.processor import Limits
from twinkle_core.remote import remote_function
from twinkle_core.sampler.adapters import AdapterModels
from twinkle_core.sampler.choosing import stream_seed
from twinkle_core.sampler.decoding import Completion, Job, complete
from twinkle_core.sampler.interface import Sampler
from twinkle_core.sampler.probing import can_pad
from twinkle_core.sampler.prompts import Prompt, read_prompts
from twinkle_core.sampler.receiving import Receiver
from twinkle_core.sampler.stopping import StopRule
from twinkle_core.template.template import load_tokenizer
from twinkle_core.warning import warn
from twinkle_core.weight_sync.interface import WeightBucket, WeightPlan, WeightSink

_COUNTER = "twinkle_core.sampler.count"


class TorchSampler(Sampler, WeightSink):
    """Samples from any causal language model of transformers.

    With a seed, what a prompt gets depends on the seed, the prompt and the number of the sample alone: not on its neighbours, the
    order, or the ranks that share the work. A prompt that stands twice in a call therefore gets the same twice; `num_samples`
    gives different ones. (Batches of other shapes round differently, about 1e-6 in fp32, so a draw that falls on the boundary
    between two tokens may differ.) Without a seed every call draws anew, from the seed of `initialize`. The global generators
    of torch, numpy and Python are not touched.

    A completion ends at an end token of the template, or without one of the model and its tokenizer; at a stop string; after
    `max_tokens`; or where the model's positions end. An empty prompt is an error, no prompts give no responses. With
    `max_tokens=0` each response has its `prompt_logprobs`, and sequences without tokens.

    Args:
        model_id: `ms://org/name`, `hf://org/name`, `tiny://name`, or the path of a model or a full-parameter checkpoint.
        dtype: of the weights, e.g. "bfloat16"; None keeps that of the checkpoint.
        device: e.g. "cpu" or "cuda"; None is the best there is.
        attn_implementation: as transformers names it; None is its default.
        trust_remote_code: whether code that ships with the model may run; None asks `TWINKLE_TRUST_REMOTE_CODE`.
        max_batch_size: completions computed at once, >= 1. More cost memory for their keys and values.
        max_cached_adapters: models of `adapter_uri=` kept for the next call, >= 1. Each holds the weights that it changes.
        remote_group: where to place it, in modes that have groups.
        device_mesh: data axes (`dp`, `fsdp`) only.
    """

    def __init__(
        self,
        model_id: str,
        *,
        dtype: Any = None,
        device: str | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool | None = None,
        max_batch_size: int = 64,
        max_cached_adapters: int = 2,
        remote_group: str | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        check_count("max_batch_size", max_batch_size, least=1)
        check_count("max_cached_adapters", max_cached_adapters, least=1)
        if device_mesh is not None and device_mesh.world_size != device_mesh.data_world_size:
            raise MeshError(f"`TorchSampler` holds the whole model on each rank, but the mesh is {device_mesh.factors()}. Use `dp` "
                            "and `fsdp` only.")
        self.model_id = model_id
        self._mesh = device_mesh
        self._max_batch_size = max_batch_size
        self._template: Any = None
        self._load_options: dict[str, Any] = {
            "dtype": resolve_dtype(dtype), "device": choose_device(device), "attn_implementation": attn_implementation,
            "trust_remote_code": trust_remote_code}
        self.model: Any = load_pretrained(model_id, **self._load_options).requires_grad_(False)
        what = f"`{model_id}` (model type `{self.model.config.model_type}`)"
        self._can_pad = can_pad(self.model, what=what)
        if not self._can_pad:
            warn(f"{what} lets padding into its state, so only prompts of one length are computed together. Prompts of "
                          "many lengths will be slow.")
        self._tokenizer: Any = None
        self._adapters = AdapterModels(self.model, model_id=model_id, keep=max_cached_adapters,
                                       load_model=lambda folder: load_pretrained(str(folder), **self._load_options))
        current = session.current()
        self._receiver: Receiver | None = None
        self._number = current.state.get(_COUNTER, 0)
        current.state[_COUNTER] = self._number + 1
        self._calls = 0

    @remote_function()
    def set_template(self, template: Any, **options: Any) -> None:
        """Set the template that turns conversations into prompts; its end tokens then end completions.

        `template`: a class, an instance, or a registered name. `options` are its constructor's; `model_id` is this model's unless
        said.
        """
        if isinstance(template, (str, type)):
            options = {"model_id": self.model_id, **options}
        self._template = registry.resolve_argument("templates", template, argument="set_template", options=options)

    @remote_function()
    def add_adapter_to_sampler(self, adapter_name: str, adapter_uri: str) -> None:
        """Load the checkpoint at `adapter_uri` under a name, as it is now. Raises: `SamplerError` if it does not fit the model."""
        self._adapters.add(adapter_name, adapter_uri)

    @remote_function(dispatch="all", collect="first", sync=True)
    def begin_weights(self, plan: WeightPlan) -> None:
        """Get ready for the weights of a model."""
        self._receiver = Receiver(plan, self._adapters)

    @remote_function(dispatch="all", collect="first", sync=True)
    def write_weights(self, bucket: WeightBucket) -> None:
        """Take one bucket of them."""
        self._receiving().write(bucket)

    @remote_function(dispatch="all", collect="first", sync=True)
    def end_weights(self) -> None:
        """Use them from the next token on."""
        self._receiving().end()
        self._receiver = None

    @remote_function(dispatch="slice_dp", collect="flatten")
    def sample(
        self,
        inputs: Sequence[Any],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        adapter_name: str = "",
        adapter_uri: str | None = None,
    ) -> list[SampleResponse]:
        """Return one response an input, in order. See `Sampler.sample`."""
        return self._sample(inputs, sampling_params, adapter_name=adapter_name, adapter_uri=adapter_uri, on_token=None)

    def stream(
        self,
        item: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        on_text: Callable[[str], None],
        adapter_name: str = "",
        adapter_uri: str | None = None,
    ) -> SampleResponse:
        """Sample one completion of one input, calling `on_text` with each piece of its text as soon as it is certain.

        In this process only. The pieces joined are the `decoded` of the response.
        """
        params = SamplingParams.of(sampling_params)
        if params.num_samples != 1:
            raise ArgumentError(f"`stream` shows one completion, but `num_samples={params.num_samples}`. Use `sample`.")
        rule, tokens, shown = self._stop_rule(params), list[int](), ""

        def show(row: int, token: int) -> None:
            nonlocal shown
            tokens.append(token)
            text = rule.certain_text(tokens)
            if len(text) > len(shown):
                on_text(text[len(shown):])
                shown = text

        response = self._sample([item], params, adapter_name=adapter_name, adapter_uri=adapter_uri, on_token=show)[0]
        rest = response.sequences[0].decoded[len(shown):]
        if rest:
            on_text(rest)
        return response

    def _sample(
        self, inputs: Sequence[Any], sampling_params: SamplingParams | Mapping[str, Any] | None, *, adapter_name: str,
        adapter_uri: str | None, on_token: Callable[[int, int], None] | None,
    ) -> list[SampleResponse]:
        params = SamplingParams.of(sampling_params)
        if self._receiver is not None:
            raise SamplerError("The weights of this sampler are half sent: `sync_weights()` did not end. Call it again.")
        model = self._adapters.get(adapter_name, adapter_uri)
        prompts = read_prompts(inputs, self._template, Limits.of(self.model.config), max_tokens=params.max_tokens)
        seeds = self._seeds(prompts, params)
        self._calls += 1
        rule = self._stop_rule(params)
        completions: list[list[Completion]] = [[] for _ in prompts]
        scores: list[list[float | None] | None] = [None] * len(prompts)
        for batch, count in self._batches(prompts, params.num_samples):
            first = len(completions[batch[0]])  # samples of these prompts that earlier batches have made
            rows, batch_scores = complete(model, Job(
                prompts=[prompts[index].tokens for index in batch],
                params=params,
                samples=count,
                seeds=[seed for index in batch for seed in seeds[index][first:first + count]],
                max_tokens=[prompts[index].max_tokens for index in batch],
                is_stop=rule.is_stop,
                on_token=on_token,
            ))
            for place, index in enumerate(batch):
                completions[index].extend(rows[place * count:(place + 1) * count])
                scores[index] = batch_scores[place] if batch_scores is not None else None
        return [SampleResponse(sequences=[_sequence(prompt, row, rule, params) for row in rows], prompt_logprobs=score)
                for prompt, rows, score in zip(prompts, completions, scores, strict=True)]

    def _batches(self, prompts: Sequence[Prompt], num_samples: int) -> list[tuple[list[int], int]]:
        """Return (indices of prompts, samples of each), at most `max_batch_size` rows, prompts of like length together."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].tokens))
        size = self._max_batch_size
        if num_samples > size:
            counts = [min(size, num_samples - start) for start in range(0, num_samples, size)]
            return [([index], count) for index in order for count in counts]
        groups = [order]
        if not self._can_pad:
            groups = [list(group) for _, group in itertools.groupby(order, key=lambda index: len(prompts[index].tokens))]
        width = size // num_samples
        return [(group[start:start + width], num_samples) for group in groups for start in range(0, len(group), width)]

    def _seeds(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[int]]:
        samples = range(params.num_samples)
        if params.seed is not None:
            return [[stream_seed("said", int(params.seed), prompt.tokens, sample) for sample in samples] for prompt in prompts]
        current = session.current()
        mesh = self._mesh or current.mesh
        # ranks that see the same prompts must draw the same, all others differ
        rank = mesh.data_rank(current.launcher.topology().rank) if mesh is not None else 0
        return [[stream_seed("drawn", current.seed, rank, self._number, self._calls, index, sample) for sample in samples]
                for index in range(len(prompts))]

    def _receiving(self) -> Receiver:
        if self._receiver is None:
            raise SamplerError("No weights are expected. Use `CheckpointEngineManager(...).sync_weights()`.")
        return self._receiver

    def _stop_rule(self, params: SamplingParams) -> StopRule:
        tokenizer = self._template.tokenizer if self._template is not None else self._own_tokenizer()
        stop_ids = list(getattr(self._template, "stop_token_ids", None) or ())
        if not stop_ids:
            said = getattr(self.model.generation_config, "eos_token_id", None)
            stop_ids = [token for token in (*(said if isinstance(said, list) else [said]), tokenizer.eos_token_id)
                        if token is not None]
        return StopRule(tokenizer, stop_ids, params)

    def _own_tokenizer(self) -> Any:
        if self._tokenizer is None:
            try:
                self._tokenizer = load_tokenizer(self.model_id, trust_remote_code=self._load_options["trust_remote_code"])
            except (TemplateError, HubError) as error:
                raise SamplerError(f"Completions cannot be decoded: {error}. Call `set_template(..., model_id=...)` with a model "
                                   "that has the same tokenizer.") from error
        return self._tokenizer


def _sequence(prompt: Prompt, row: Completion, rule: StopRule, params: SamplingParams) -> SampledSequence:
    return SampledSequence(
        tokens=row.tokens,
        logprobs=row.logprobs,
        decoded=rule.text(row.tokens),
        stop_reason=row.stop_reason,
        new_input_feature=prompt.extend(row.tokens, row.logprobs),
        top_logprobs=row.top_logprobs if params.logprobs else None,
    )
