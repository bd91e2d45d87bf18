"""`TransformersModel`: any Hugging Face causal language model, trained as a whole or through LoRA adapters.

The public methods, and which state each of them concerns. How a micro-batch is run stands in `forward`, what happens to gradients
in `training`, what is in a checkpoint in `saving`.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from twinkle_core import registry, session
from twinkle_core.data_format import ModelOutput
from twinkle_core.errors import ArgumentTypeError, ModelError, check_count, check_flag
from twinkle_core.loss.interface import FunctionLoss
from twinkle_core.mesh import DeviceMesh
from twinkle_core.model import lora_start, rank_saving, reporting, saving, training
from twinkle_core.model.adapter import AdapterState, ForwardPass, Totals
from twinkle_core.model.batches import run_batches
from twinkle_core.model.forward import MicroResult, ModuleRunner
from twinkle_core.model.inputs import check_top_logprobs, choose_loss, features_of
from twinkle_core.model.interface import TrainableModel
from twinkle_core.model.loading import seed_once
from twinkle_core.model.lora import LoraAdapters, lora_config
from twinkle_core.model.optimizers import build_optimizer, build_scheduler
from twinkle_core.model.packing import fit_processor
from twinkle_core.model.pipelined import run_pipelined
from twinkle_core.model.placing import Placing, load_for, own_data_rank
from twinkle_core.model.precision import LossScaler, Precision, check_mixed_precision, check_trained_dtype, resolve_dtype
from twinkle_core.model.sending import Sending
from twinkle_core.model.states import begun_like, check_new, check_placed, check_trained, chosen_state, pending_of, trainable
from twinkle_core.parallel import gradients
from twinkle_core.parallel.choice import check_model, choose_strategies
from twinkle_core.parallel.pipeline import Pipeline
from twinkle_core.parallel.placed import Placed
from twinkle_core.platforms.choice import choose_device
from twinkle_core.processor import InputProcessor, MicroBatch, build_processor
from twinkle_core.weight_sync.interface import BUCKET_BYTES, WeightBucket, WeightPlan, WeightSource


class TransformersModel(TrainableModel, WeightSource):
    """A model from a hub id or a folder.

    Args:
        model_id: `ms://org/name`, `hf://org/name`, a folder, or another installed hub's URI.
        device_mesh: how the ranks of this model are arranged; None: the run's.
        remote_group: the group of ranks that it lives on, where the mode has groups.
        dtype: of the model's weights, e.g. "bfloat16"; adapters are fp32 (fp64 in an fp64 model). None: frozen weights as in the
            checkpoint, trained ones fp32.
        device: "cpu", "cuda:0", ...; None: the best there is.
        mixed_precision: dtype of the arithmetic: "no" (fp32), "bf16" or "fp16" (with a loss scale). None: fp32 in full-parameter
            training, the frozen weights' dtype under LoRA.
        gradient_accumulation_steps: backward passes a step, where that is said beforehand; adapters say their own.
        gradient_checkpointing: compute activations again in the backward pass, to save memory.
        attn_implementation: as transformers takes it; None leaves it to transformers.
        trust_remote_code: whether code that ships with the model may run; None: not, unless `TWINKLE_TRUST_REMOTE_CODE` says so.

    The first model of a run seeds torch's global random generators, from which dropout draws.

    Attributes:
        module: the Hugging Face module.
        lora: its adapters.
        precision: its dtypes.
    """

    def __init__(
        self,
        model_id: str,
        *,
        device_mesh: DeviceMesh | None = None,
        remote_group: str | None = None,
        dtype: Any = None,
        device: str | None = None,
        mixed_precision: Literal["no", "bf16", "fp16"] | None = None,
        gradient_accumulation_steps: int = 1,
        gradient_checkpointing: bool = False,
        attn_implementation: str | None = None,
        trust_remote_code: bool | None = None,
    ) -> None:
        weights_dtype = resolve_dtype(dtype)
        check_mixed_precision(mixed_precision)
        check_count("gradient_accumulation_steps", gradient_accumulation_steps, least=1)
        check_flag("gradient_checkpointing", gradient_checkpointing)
        self.model_id, self.gradient_checkpointing = model_id, gradient_checkpointing
        self.mesh = device_mesh or session.current().mesh
        self._strategies = choose_strategies(self.mesh)
        self.device = choose_device(device)
        seed_once(salt=own_data_rank(self.mesh))
        self.module, source = load_for(
            self.mesh, model_id, dtype=weights_dtype, device=self.device, attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code)
        check_model(self.module.config, self.mesh, self._strategies)
        self.precision = Precision(self.module, dtype=weights_dtype, mixed_precision=mixed_precision,
                                   device_type=self.device.partition(":")[0])
        self.lora = LoraAdapters(self.module, device=self.device)
        self._runner = ModuleRunner(self.module, self.precision)
        self._whole = AdapterState(name="", parameters=trainable(self.module), is_lora=False, processor=InputProcessor(),
                                   gradient_accumulation_steps=gradient_accumulation_steps)
        self._is_whole_ready = False
        self._placing = Placing(self.module, source, mesh=self.mesh, strategies=self._strategies, device=self.device)
        self._placed: Placed | None = None
        self._pipeline: Pipeline | None = None
        self._sending: Sending | None = None
        self._adapters: dict[str, AdapterState] = {}

    def state(self, adapter_name: str = "") -> AdapterState:
        """Return the state that `adapter_name` means: the adapter's, the only adapter's, or the whole model's if it has none.

        Raises: `ModelError` that lists the adapters if none is meant, or `ArgumentError` if there is none of that name.
        """
        return chosen_state(adapter_name, self._adapters, self._whole)

    def forward(self, inputs: Sequence[Any], *, adapter_name: str = "", **loss_inputs: Any) -> ModelOutput:
        """Run the model and keep what `calculate_loss` and `backward` need."""
        state = self._in_parts("forward", adapter_name)
        kept: list[tuple[MicroBatch, torch.Tensor, float]] = []
        with training.all_or_nothing(state):
            output, totals = self._run(
                state, inputs, loss_inputs, lambda batch, result: kept.append((batch, result.loss, result.count)))
        state.pending = ForwardPass(losses=kept, totals=totals)
        return output

    def forward_only(
        self, inputs: Sequence[Any], *, adapter_name: str = "", disable_lora: bool = False, top_logprobs: int = 0,
        **loss_inputs: Any,
    ) -> ModelOutput:
        """Run the model without gradients and without dropout; `disable_lora` runs the base model."""
        check_flag("disable_lora", disable_lora)
        check_top_logprobs(top_logprobs, self.module.config, self.mesh)
        state = self.ready(adapter_name)
        count = state.evaluation.begun() if not disable_lora else state.not_counting()
        with count, self.lora.disabled() if disable_lora else contextlib.nullcontext():
            output, totals = self._run(
                state, inputs, loss_inputs, lambda batch, result: None, is_training=False, top=top_logprobs)
        if not disable_lora:
            state.evaluation.add(totals)
        return output

    def forward_backward(self, inputs: Sequence[Any], *, adapter_name: str = "", **loss_inputs: Any) -> ModelOutput:
        """Add the gradients of a batch, micro-batch by micro-batch."""
        state = self.ready(adapter_name)

        def add(batch: MicroBatch, result: MicroResult) -> None:
            training.add_gradients(state, batch, result.loss, result.count)

        with training.all_or_nothing(state):
            training.reopen(state)
            output, totals = self._run(state, inputs, loss_inputs, add)
        self._added(state, totals)
        return output

    def calculate_loss(self, *, adapter_name: str = "") -> float:
        """Return the token mean of the last `forward`; asking twice changes nothing."""
        pending = pending_of(self._in_parts("calculate_loss", adapter_name), "calculate_loss")
        return pending.totals.loss

    def backward(self, *, adapter_name: str = "") -> None:
        """Add the gradients of the last `forward`."""
        state = self._in_parts("backward", adapter_name)
        pending = pending_of(state, "backward")
        if pending.is_consumed:
            raise ModelError("`backward()` was called twice for one `forward(...)`. Call `forward` again, or use "
                             "`forward_backward`.")
        pending.is_consumed = True
        self._runner.set_mode(training=True)
        losses, pending.losses = pending.losses, []
        with training.all_or_nothing(state):
            training.reopen(state)
            for index, (batch, loss, count) in enumerate(losses):
                with gradients.reducing(state.placed, index == len(losses) - 1 and state.closes_window):
                    training.add_gradients(state, batch, loss, count)
        self._added(state, pending.totals)

    def clip_grad_norm(self, max_norm: float = 1.0, *, adapter_name: str = "") -> float | None:
        """Clip the accumulated gradient, divided by its token count; None where there is nothing to clip yet."""
        training.check_max_norm(max_norm)
        return training.clip_gradients(self.ready(adapter_name), max_norm)

    def step(self, *, adapter_name: str = "") -> bool:
        """Apply the accumulated gradient and clear it."""
        state = self.ready(adapter_name)
        return self._stepped(state, training.step(state))

    def zero_grad(self, *, adapter_name: str = "") -> None:
        """Discard the accumulated gradient."""
        state = self.state(adapter_name)
        if 0 < state.micro_steps < state.gradient_accumulation_steps:
            self._runner.say_once(
                f"`zero_grad()` discarded {state.micro_steps} of {state.gradient_accumulation_steps} accumulated backward passes. "
                "`step()` clears the gradient by itself: leave `zero_grad()` out of the loop.")
        state.discard_gradients(keep_forward=True)

    def lr_step(self, *, adapter_name: str = "") -> bool:
        """Advance the scheduler, if the optimizer has stepped since the last time."""
        return training.advance_scheduler(self.state(adapter_name))

    def clip_grad_and_step(self, max_norm: float = 1.0, *, adapter_name: str = "") -> bool:
        """Clip, step and advance the scheduler."""
        training.check_max_norm(max_norm)
        state = self.ready(adapter_name)
        has_stepped = self._stepped(state, training.step(state, max_norm=max_norm))
        training.advance_scheduler(state)
        return has_stepped

    def set_loss(self, loss: Any, *, adapter_name: str = "", **options: Any) -> None:
        """Set the loss."""
        self.state(adapter_name).loss = registry.resolve_argument(
            "losses", loss, argument="set_loss", options=options, function=FunctionLoss)

    def set_optimizer(self, optimizer: Any, *, adapter_name: str = "", **options: Any) -> None:
        """Set the optimizer; a scheduler that was set before is dropped with the old one."""
        state = self.ready(adapter_name)
        check_trained_dtype(state.parameters.values())
        state.optimizer = build_optimizer(optimizer, state.parameters.values(), options, is_lora=state.is_lora)
        state.scheduler, state.is_lr_step_due = None, False

    def set_lr_scheduler(self, scheduler: Any, *, adapter_name: str = "", **options: Any) -> None:
        """Set the learning-rate scheduler of the optimizer."""
        state = self.ready(adapter_name)
        state.scheduler = build_scheduler(scheduler, training.ensure_optimizer(state), options)

    def set_template(self, template: Any, *, adapter_name: str = "", **options: Any) -> None:
        """Set the template; `model_id` is this model's unless said."""
        state = self.state(adapter_name)
        if isinstance(template, str) or inspect.isclass(template):
            options.setdefault("model_id", self.model_id)
        state.template = registry.resolve_argument("templates", template, argument="set_template", options=options)

    def set_processor(
        self, processor: Any = None, *, micro_batch_size: int | None = None, packing: bool = False, adapter_name: str = "",
        **options: Any,
    ) -> None:
        """Set how features become tensors: options, or an `InputProcessor` class or instance of your own."""
        state = self.state(adapter_name)
        made = build_processor(processor, dict(options, micro_batch_size=micro_batch_size, packing=packing))
        fit_processor(made, self._runner)
        state.processor = made

    def add_metric(self, metric: Any, *, adapter_name: str = "", **options: Any) -> None:
        """Add a metric; training and evaluation each get their own count."""
        state = self.state(adapter_name)
        made = registry.resolve_argument("metrics", metric, argument="add_metric", options=options)
        state.metrics.append(made)
        state.eval_metrics.append(copy.deepcopy(made))

    def calculate_metric(self, is_training: bool, *, adapter_name: str = "") -> dict[str, float]:
        """Return numbers over what ran since the last call, and hand them to the trackers."""
        check_flag("is_training", is_training)
        state = self.state(adapter_name)
        is_new = not (state.training if is_training else state.evaluation).is_empty
        numbers = reporting.collect_metrics(state, is_training=is_training)
        if is_new:
            prefix = f"{state.name}/" if len(self._adapters) > 1 else ""
            reporting.report(state, numbers, is_training=is_training, prefix=prefix)
        return numbers

    def add_adapter_to_model(self, adapter_name: str, config: Any, *, gradient_accumulation_steps: int = 1) -> None:
        """Add a LoRA. What was said for the whole model before (loss, template, processor, metrics) is where it starts from;
        its accumulation is its own."""
        check_new(adapter_name, self._adapters, gradient_accumulation_steps)
        made, whole = lora_config(config), self._whole
        check_placed(made, self._placed, self._strategies, self._adapters)
        if not self._adapters and whole.optimizer is not None:
            check_trained(whole, adapter_name, self.model_id, self._runner.say_once)
            self.precision.keep_widened()
        if whole.gradient_accumulation_steps > 1 and gradient_accumulation_steps == 1:
            self._runner.say_once(
                f"The model was told `gradient_accumulation_steps={whole.gradient_accumulation_steps}`, which is that of "
                f"full-parameter training; the adapter `{adapter_name}` has its own, 1. Say it in `add_adapter_to_model`.")
        if self._placing.is_hollow and (field := lora_start.needs_weights(made)):
            self._placing.fill_whole(self.lora, self.model_id, f"`{field}` of an adapter computes with its weights")
        parameters = self.lora.add(adapter_name, made)
        self.lora.base_steps = whole.step
        self._runner.forget_mode()
        whole.discard_gradients()
        self.precision.use_lora()
        self._adapters[adapter_name] = begun_like(
            whole, adapter_name, parameters, gradient_accumulation_steps=gradient_accumulation_steps, scaler=self._scaler(),
            placed=self._placed)

    def save(
        self, name: str, output_dir: str = "outputs", *, adapter_name: str = "", with_optimizer: bool = False, merge: bool = False,
        keep_last: int | None = None,
    ) -> str:
        """Save a checkpoint and return its folder."""
        check_flag("with_optimizer", with_optimizer)
        check_flag("merge", merge)
        return rank_saving.save(self, name, output_dir, adapter_name=adapter_name, with_optimizer=with_optimizer, merge=merge,
                                keep_last=keep_last)

    def load(self, path: str, *, adapter_name: str = "") -> None:
        """Load weights only."""
        rank_saving.load(self, path, adapter_name=adapter_name)

    def resume_from_checkpoint(self, path: str, *, adapter_name: str = "") -> str | Literal[False]:
        """Load weights, optimizer, scheduler and random state."""
        return rank_saving.resume(self, path, adapter_name=adapter_name)

    def get_state_dict(self, *, adapter_name: str = "", merge: bool = False) -> dict[str, Any]:
        """Return name -> tensor of the weights, on the CPU: the adapter's, or the whole model's (merged, if asked)."""
        check_flag("merge", merge)
        return rank_saving.state_dict(self, adapter_name=adapter_name, merge=merge)

    def get_train_configs(self, *, adapter_name: str = "") -> str:
        """Return everything that decides the training, for people."""
        return reporting.describe(self, self.ready(adapter_name))

    def apply_patch(self, patch: Callable[[Any], None]) -> None:
        """Call `patch(module)`; it changes the module in place."""
        if not callable(patch):
            raise ArgumentTypeError(f"`apply_patch` got {patch!r}. Pass a function that takes the module and changes it in place.")
        self._runner.forget_mode()
        self._runner.forget_head()
        self._placing.patch(patch, self.lora, self.model_id)
        if self._whole.optimizer is None and not self._adapters:  # a patch may have frozen some
            self._whole.parameters = trainable(self.module)

    def plan_weights(self, *, adapter_name: str = "", merge: bool = False, bucket_bytes: int = BUCKET_BYTES) -> WeightPlan:
        """Return what `read_weights` will give."""
        check_flag("merge", merge)
        self._sending = Sending(self, self.ready(adapter_name), merge=merge, bucket_bytes=bucket_bytes)
        return self._sending.plan

    def read_weights(self, index: int) -> WeightBucket:
        """Return one bucket of the last plan."""
        if self._sending is None:
            raise ModelError("`read_weights` needs a `plan_weights` before it. Use `CheckpointEngineManager`.")
        return self._sending.read(index)

    def upload_to_hub(self, path: str, repo_id: str, *, private: bool = True) -> str:
        """Upload a saved checkpoint and return its URI."""
        check_flag("private", private)
        return saving.upload(path, repo_id, private=private)

    def ready(self, adapter_name: str) -> AdapterState:
        """Return the state with the module prepared for it: dtypes settled, the adapter active."""
        state = self.state(adapter_name)
        if state.is_lora:
            self.lora.activate(state.name)
        elif not self._is_whole_ready:
            self.precision.use_full()
            state.scaler = self._scaler()
            self._is_whole_ready = True
        if self._placed is None:
            self._place()
        return state

    def _in_parts(self, method: str, adapter_name: str) -> AdapterState:
        """Return the ready state, unless forward and backward pass cannot be asked for apart."""
        state = self.ready(adapter_name)
        if self._pipeline is not None:
            raise ModelError(f"`{method}()` cannot be called under `pp`: forward and backward passes of several micro-batches run "
                             "at the same time. Use `forward_backward`.")
        return state

    def _place(self) -> None:
        """Put the module, with the adapters that it has by now, on its ranks."""
        placed = self._placing.place(self._runner, self.lora, gradient_checkpointing=self.gradient_checkpointing)
        self._placed, self._runner.placed = placed, placed
        if placed.stages:
            self._pipeline = Pipeline(placed)
            self._runner.root.call = self._pipeline.forward
        for state in (self._whole, *self._adapters.values()):
            state.placed = placed
            state.parameters = self.lora.parameters(state.name) if state.is_lora else trainable(self.module)

    def _run(
        self, state: AdapterState, inputs: Sequence[Any], loss_inputs: dict[str, Any],
        each: Callable[[MicroBatch, MicroResult], None], *, is_training: bool = True, top: int = 0,
    ) -> tuple[ModelOutput, Totals]:
        """Run all micro-batches; `each` is called after every one."""
        if is_training:
            check_trained_dtype(state.parameters.values())
        features = features_of(inputs, state)
        loss, extra = choose_loss(state, loss_inputs, features, training=is_training)
        if self._pipeline is not None:
            if is_training:
                state.rows.extend(feature.get("row_id") for feature in features)
            return run_pipelined(self._runner, self._pipeline, state, features, loss, extra, device=self.device,
                                 is_training=is_training, closes_window=state.closes_window)
        return run_batches(self._runner, state, features, loss, extra, device=self.device, is_training=is_training,
                           closes_window=state.closes_window, each=each, top=top)

    def _added(self, state: AdapterState, totals: Totals) -> None:
        state.grad_count += totals.count
        state.micro_steps += 1
        state.training.add(totals)

    def _stepped(self, state: AdapterState, has_stepped: bool) -> bool:
        if has_stepped:
            state.training.end()
            reporting.show_progress(state)
        return has_stepped

    def _scaler(self) -> LossScaler | None:
        return LossScaler() if self.precision.needs_scaler() else None
