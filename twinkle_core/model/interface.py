"""The interface of a trainable model: the same in every mode.

A loop with only `forward_backward` and `clip_grad_and_step` trains. Every method that concerns one adapter takes `adapter_name`;
with one adapter, or none, it may be left out.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from twinkle_core.data_format import ModelOutput
from twinkle_core.remote import RemoteComponent, remote_function


class TrainableModel(RemoteComponent):
    """A model, its adapters, and for each its optimizer, scheduler, loss, template, processor and metrics."""

    @remote_function(dispatch="slice_dp", collect="flatten")
    @abstractmethod
    def forward(self, inputs: Sequence[Any], *, adapter_name: str = "", **loss_inputs: Any) -> ModelOutput:
        """Run the model and keep what `calculate_loss` and `backward` need. `inputs`: features, conversations or responses."""

    @remote_function(dispatch="slice_dp", collect="flatten")
    @abstractmethod
    def forward_only(
        self, inputs: Sequence[Any], *, adapter_name: str = "", disable_lora: bool = False, top_logprobs: int = 0,
        **loss_inputs: Any,
    ) -> ModelOutput:
        """Run the model without gradients, e.g. for evaluation. `disable_lora` runs the base model, which counts for no metric;
        `top_logprobs` asks for so many of the likeliest tokens in each supervised place."""

    @remote_function(dispatch="slice_dp", collect="flatten")
    @abstractmethod
    def forward_backward(self, inputs: Sequence[Any], *, adapter_name: str = "", **loss_inputs: Any) -> ModelOutput:
        """Add the gradients of a batch. Several calls before one `step` equal one call with all their rows."""

    @remote_function()
    @abstractmethod
    def calculate_loss(self, *, adapter_name: str = "") -> float:
        """Return the loss of the last `forward`: the token mean."""

    @remote_function()
    @abstractmethod
    def backward(self, *, adapter_name: str = "") -> None:
        """Add the gradients of the last `forward`."""

    @remote_function()
    @abstractmethod
    def clip_grad_norm(self, max_norm: float = 1.0, *, adapter_name: str = "") -> float | None:
        """Scale the gradients so that their global L2 norm is at most `max_norm`; return the norm before.

        Returns None inside a said accumulation window, when there is nothing to clip yet.
        """

    @remote_function()
    @abstractmethod
    def step(self, *, adapter_name: str = "") -> bool:
        """Apply the accumulated gradient and clear it. Return whether it did (every n-th call when accumulation is said)."""

    @remote_function()
    @abstractmethod
    def zero_grad(self, *, adapter_name: str = "") -> None:
        """Discard the accumulated gradient."""

    @remote_function()
    @abstractmethod
    def lr_step(self, *, adapter_name: str = "") -> bool:
        """Advance the learning-rate scheduler, if there is one. Return whether it did."""

    @remote_function()
    @abstractmethod
    def clip_grad_and_step(self, max_norm: float = 1.0, *, adapter_name: str = "") -> bool:
        """Clip, step and advance the scheduler. Return whether the optimizer stepped."""

    @remote_function(lazy_collect=False)
    @abstractmethod
    def set_loss(self, loss: Any, *, adapter_name: str = "", **options: Any) -> None:
        """Set the loss: a class, an instance, a registered name, or a function `(outputs, targets, **inputs) -> (sum, count)`."""

    @remote_function(lazy_collect=False)
    @abstractmethod
    def set_optimizer(self, optimizer: Any, *, adapter_name: str = "", **options: Any) -> None:
        """Set the optimizer: a class, a name in `torch.optim`, a function of the parameters, or an instance over just these."""

    @remote_function(lazy_collect=False)
    @abstractmethod
    def set_lr_scheduler(self, scheduler: Any, *, adapter_name: str = "", **options: Any) -> None:
        """Set the scheduler: a class, a name in `torch.optim.lr_scheduler` or of Twinkle, a function of the optimizer, or an
        instance over the optimizer that is set."""

    @remote_function(lazy_collect=False)
    @abstractmethod
    def set_template(self, template: Any, *, adapter_name: str = "", **options: Any) -> None:
        """Set the template, so that `inputs` may be conversations."""

    @remote_function(lazy_collect=False)
    @abstractmethod
    def set_processor(
        self, processor: Any = None, *, micro_batch_size: int | None = None, packing: bool = False, adapter_name: str = "",
        **options: Any,
    ) -> None:
        """Set how features become tensors. `micro_batch_size`: rows at once; None: all. `packing`: rows without padding."""

    @remote_function(lazy_collect=False)
    @abstractmethod
    def add_metric(self, metric: Any, *, adapter_name: str = "", **options: Any) -> None:
        """Add a metric whose numbers `calculate_metric` returns."""

    @remote_function(lazy_collect=False)
    @abstractmethod
    def calculate_metric(self, is_training: bool, *, adapter_name: str = "") -> dict[str, float]:
        """Return numbers over what was run since the last call, and hand them to the trackers.

        Training: `loss`, `grad_norm` (of the last step, before clipping; from the first step or clip on), `lr` (of the last step,
        or of the first that is to come), `num_tokens`, `tokens_per_s`, `step`. Evaluation: `loss`, `num_tokens`,
        `tokens_per_s`, `step`. Added metrics come on top.
        """

    @remote_function(lazy_collect=False)
    @abstractmethod
    def add_adapter_to_model(
        self, adapter_name: str, config: Any, *, gradient_accumulation_steps: int = 1,
    ) -> None:
        """Add a LoRA and train it instead of the model.

        `config`: a peft `LoraConfig` or a dict of its fields. `gradient_accumulation_steps`: this adapter's, whatever the model's.
        """

    @remote_function(lazy_collect=False, with_data_state=True)
    @abstractmethod
    def save(
        self,
        name: str,
        output_dir: str = "outputs",
        *,
        adapter_name: str = "",
        with_optimizer: bool = False,
        merge: bool = False,
        keep_last: int | None = None,
    ) -> str:
        """Save a checkpoint and return what `load`, `resume_from_checkpoint` and `sample(adapter_uri=)` take.

        The folder is `output_dir/name`, then `name@2`, `name@3`: what was saved once never changes.

        Args:
            with_optimizer: also what `resume_from_checkpoint` needs: optimizer, scheduler, random state, and the positions of
                this run's data loaders.
            merge: save the model with the adapter merged into it.
            keep_last: delete older versions of this name but the last so many.
        """

    @remote_function(lazy_collect=False)
    @abstractmethod
    def load(self, path: str, *, adapter_name: str = "") -> None:
        """Load weights only. Raises: `CheckpointError` before anything in memory has changed."""

    @remote_function(lazy_collect=False)
    @abstractmethod
    def resume_from_checkpoint(self, path: str, *, adapter_name: str = "") -> str | Literal[False]:
        """Load weights, optimizer, scheduler and random state; return the checkpoint, for `DataLoader.resume_from_checkpoint`.

        `path`: a checkpoint, or a folder of checkpoints: the newest complete one. Returns False if such a folder holds none.
        Raises: `CheckpointError` if a part is missing, before anything in memory has changed.
        """

    @remote_function()
    @abstractmethod
    def get_state_dict(self, *, adapter_name: str = "", merge: bool = False) -> dict[str, Any]:
        """Return name -> tensor of the weights, on the CPU."""

    @remote_function(lazy_collect=False)
    @abstractmethod
    def get_train_configs(self, *, adapter_name: str = "") -> str:
        """Return everything that decides the training, for people."""

    @remote_function(lazy_collect=False)
    @abstractmethod
    def apply_patch(self, patch: Callable[[Any], None]) -> None:
        """Change the underlying module in place by a function of it."""

    @remote_function(execute="first", lazy_collect=False)
    @abstractmethod
    def upload_to_hub(self, path: str, repo_id: str, *, private: bool = True) -> str:
        """Upload a saved checkpoint, e.g. to "ms://org/name", and return its URI."""
