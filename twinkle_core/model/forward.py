"""Running a module on one micro-batch: backbone, head, loss.

The head of a causal language model is asked for supervised positions only, in chunks (`twinkle_core.model.head`). That this gives
what the model's own `forward` gives is checked once on a few tokens; a model that does more to its logits is run as a whole, and
that is said. Accumulating gradients is left to `twinkle_core.model.training`.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from twinkle_core.data_format import IGNORE_INDEX
from twinkle_core.errors import ModelError
from twinkle_core.loss.interface import Loss
from twinkle_core.loss.result import check_count, checked_result, loss_name
from twinkle_core.model.head import CHUNK_ELEMENTS, Head, token_logprobs
from twinkle_core.model.loading import seeded
from twinkle_core.parallel.pipeline import config_of_layers
from twinkle_core.processor import Alternatives, MicroBatch, TokenOutputs
from twinkle_core.warning import warn

if TYPE_CHECKING:
    from twinkle_core.model.precision import Precision
    from twinkle_core.parallel.placed import Placed

_PROBE_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class MicroResult:
    """What one micro-batch gave.

    Attributes:
        loss: the sum, with its graph when gradients are on.
        loss_sum: the same as a number.
        count: by which the sum is divided.
        logprobs: of each sequence: entry t speaks about its token t, 0.0 where it is not supervised.
        outputs: for metrics.
        top_logprobs: of each sequence, where asked for: entry t is about what could stand at its token t, token -> log-probability.
    """

    loss: torch.Tensor
    loss_sum: float
    count: float
    logprobs: list[list[float]]
    outputs: TokenOutputs
    top_logprobs: list[list[dict[int, float]]] = field(default_factory=list)


class ModuleRunner:
    """Runs one module."""

    def __init__(self, module: Any, precision: "Precision") -> None:
        self.module, self.precision = module, precision
        self.root = _Root(module, self)
        self.placed: Placed | None = None
        self._head_is_linear: bool | None = None
        self._is_training: bool | None = None
        self._said: set[str] = set()

    def run(self, batch: MicroBatch, loss: Loss, *, training: bool, scale: float = 1.0, top: int = 0) -> MicroResult:
        """Return the loss of `batch` and its log-probabilities. `training`: with gradients, and dropout on.

        `scale` is the factor that the loss will get before the backward pass. `top`: so many of the likeliest tokens are wanted.

        Raises: `ModelError` if the loss returns something else than (sum, count), or cannot be trained with.
        """
        self.set_mode(training=training)
        with torch.set_grad_enabled(training), self.precision.autocast():
            root = self.placed.replica if training and self.placed is not None and self.placed.replica is not None else self.root
            value, count, outputs = root(batch, loss, scale, top)
        return _micro_result(loss, value, count, outputs, batch, training=training)

    def compute(
        self, batch: MicroBatch, loss: Loss, scale: float, top: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, TokenOutputs]:
        """Return (sum, count, outputs): what `root` computes."""
        outputs = self._outputs(batch, loss, scale=scale, top=top)
        result: Any = loss(outputs, batch.targets_BT, **batch.loss_inputs)
        return *checked_result(loss, result), outputs

    @contextlib.contextmanager
    def mode(self, *, training: bool) -> Iterator[None]:
        """Run with or without gradients and dropout, in the model's arithmetic."""
        self.set_mode(training=training)
        with torch.set_grad_enabled(training), self.precision.autocast():
            yield

    def from_hidden(self, hidden_rld: torch.Tensor, batch: MicroBatch, loss: Loss, *, scale: float) -> MicroResult:
        """Return the loss of `batch` from its last hidden states [R, L, D]: what the last stage of a pipeline computes."""
        outputs = self._from_hidden(hidden_rld, batch, loss, scale=scale)
        result: Any = loss(outputs, batch.targets_BT, **batch.loss_inputs)
        return _micro_result(loss, *checked_result(loss, result), outputs, batch, training=torch.is_grad_enabled())

    def hidden_dtype(self) -> torch.dtype:
        """Return the dtype in which hidden states go from layer to layer."""
        return self.module.get_input_embeddings().weight.dtype if self.placed is None else self.placed.hidden_dtype

    def check_head(self) -> None:
        """Raise `ModelError` unless the logits are the output layer's of the hidden states, which a pipeline takes for granted."""
        device = self.module.get_input_embeddings().weight.device
        probed = self if device.type != "meta" else ModuleRunner(_without_layers(self.module), self.precision)
        if not probed._probe_head(torch.device("cpu") if probed is not self else device):
            raise ModelError(f"`{type(self.module).__name__}` does more to its logits than its output layer and a softcap, which "
                             "pipeline stages do not do. Use a mesh without `pp`.")
        self._head_is_linear = True

    def say_once(self, text: str) -> None:
        """Warn of something that costs time or memory, once a model."""
        if text not in self._said:
            self._said.add(text)
            warn(text)

    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return the last hidden states [R, L, D], after the final norm."""
        return self.module.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state

    def set_mode(self, *, training: bool) -> None:
        """Turn dropout on or off. The backward pass must see the mode of its forward pass where activations are computed again."""
        if self._is_training is not training:
            self.module.train(training)
            self._is_training = training

    def forget_mode(self) -> None:
        """Set the mode again before the next run: the module got new parts, which come in a mode of their own."""
        self._is_training = None

    def forget_head(self) -> None:
        """Check again before the next run whether the head gives the model's logits: the module was changed."""
        self._head_is_linear = None

    def _outputs(self, batch: MicroBatch, loss: Loss, *, scale: float, top: int) -> TokenOutputs:
        if self._head_is_linear is None:
            self._head_is_linear = self._probe_head(batch.input_ids_RL.device)
            if getattr(self.module.config.get_text_config(), "output_router_logits", False):
                self.say_once("`output_router_logits` is set in the model's configuration, but the auxiliary loss of the router is "
                              "not added to the loss here.")
        if not self._head_is_linear:
            logits_rlv = self.module(input_ids=batch.input_ids_RL, position_ids=batch.position_ids_RL, use_cache=False).logits
            logits_nv = logits_rlv.flatten(0, 1).index_select(0, batch.source_N)
            outputs = _from_logits(logits_nv, batch, keep=loss.requires_logits)
            outputs.top = _likeliest([logits_nv], top, batch) if top else None
            return outputs
        return self._from_hidden(self.hidden(batch.input_ids_RL, batch.position_ids_RL), batch, loss, scale=scale, top=top)

    def _from_hidden(self, hidden_rld: torch.Tensor, batch: MicroBatch, loss: Loss, *, scale: float, top: int = 0) -> TokenOutputs:
        hidden_nd = hidden_rld.flatten(0, 1).index_select(0, batch.source_N)
        module = self.module.get_output_embeddings()
        outputs = self._scored(module, hidden_nd, batch, loss, scale=scale)
        if top:
            pieces = hidden_nd.split(max(1, CHUNK_ELEMENTS // self.module.config.get_text_config().vocab_size))
            outputs.top = _likeliest((self._softcapped(module(piece)) for piece in pieces), top, batch)
        return outputs

    def _scored(self, module: Any, hidden_nd: torch.Tensor, batch: MicroBatch, loss: Loss, *, scale: float) -> TokenOutputs:
        shape = batch.targets_BT.shape
        if loss.requires_logits:
            self.say_once(f"The loss `{loss_name(loss)}` asks for logits, so all of them are held in memory. A loss that needs "
                          "only `outputs.logprobs` would save that.")
            return _from_logits(self._softcapped(module(hidden_nd)), batch, keep=True)
        if type(module) is torch.nn.Linear and not module._forward_hooks and not module._forward_pre_hooks:  # pyright: ignore
            expected = None if loss.logprob_gradient is None else loss.logprob_gradient * scale
            logprobs_n, is_top_n = token_logprobs(
                hidden_nd, Head(module.weight, module.bias, self._softcap(), self._vocabulary_group()), batch.targets_N,
                expected_gradient=expected)
        else:
            logprobs_n, is_top_n = self._through_module(module, hidden_nd, batch.targets_N)
        return TokenOutputs(logprobs=_spread(logprobs_n, batch.place_N, shape), is_top=_spread(is_top_n, batch.place_N, shape))

    def _through_module(
        self, module: torch.nn.Module, hidden_nd: torch.Tensor, targets_n: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ask a head that is more than a linear layer (an adapter in it, say), in chunks that the backward pass computes again."""
        def of_chunk(hidden_cd: torch.Tensor, targets_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return _pick(self._softcapped(module(hidden_cd)), targets_c)

        chunk = max(1, CHUNK_ELEMENTS // self.module.config.get_text_config().vocab_size)
        pieces: Sequence[tuple[torch.Tensor, torch.Tensor]] = [
            checkpoint(of_chunk, h, t, use_reentrant=False)  # type: ignore[misc]
            for h, t in zip(hidden_nd.split(chunk), targets_n.split(chunk), strict=True)]
        return torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])

    def _vocabulary_group(self) -> Any:
        return self.placed.ranks.group("tp") if self.placed is not None and self.placed.cut.head_is_cut else None

    def _softcap(self) -> float | None:
        return getattr(self.module.config.get_text_config(), "final_logit_softcapping", None)

    def _softcapped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self._softcap()
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _probe_head(self, device: torch.device) -> bool:
        """Return whether the model's logits are its head's output of its backbone's hidden states."""
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                size = min(_PROBE_TOKENS, self.module.get_input_embeddings().weight.shape[0])
                ids = torch.arange(size, device=device)[None]
                theirs = self.module(input_ids=ids, use_cache=False).logits.float()
                ours = self._softcapped(self.module.get_output_embeddings()(self.hidden(ids))).float()
        finally:
            self.module.train(was_training)
        is_same = theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=1e-2, atol=1e-3 * float(theirs.abs().max()))
        if not is_same:
            self.say_once(f"`{type(self.module).__name__}` does more to its logits than its output layer and a softcap, so the "
                          "memory-saving loss is off: all logits are held in memory.")
        return is_same


def _without_layers(module: Any) -> Any:
    """Return a real module of the same class and settings, without layers and with few tokens: enough to see its logits made."""
    config = copy.deepcopy(module.config)
    text = config.get_text_config()
    text.vocab_size, text.pad_token_id = _PROBE_TOKENS, None
    with seeded("cpu"):
        return type(module)(config_of_layers(config, []))


def _micro_result(
    loss: Loss, value: torch.Tensor, count: torch.Tensor, outputs: TokenOutputs, batch: MicroBatch, *, training: bool,
) -> MicroResult:
    row = torch.cat([value.detach().double().reshape(1), count.double().reshape(1),
                     outputs.logprobs.detach().double().reshape(-1)]).tolist()
    check_count(loss, row[1])
    if training and row[1] and outputs.logprobs.requires_grad and not value.requires_grad:
        raise ModelError(f"The loss `{loss_name(loss)}` returned a sum without a gradient, so nothing would be trained. "
                         "Compute it from `outputs` without `.detach()`, `.item()` or `torch.no_grad()`.")
    return MicroResult(loss=value, loss_sum=row[0], count=row[1], logprobs=_by_sequence(row[2:], batch), outputs=outputs,
                       top_logprobs=[] if outputs.top is None else _top_by_sequence(outputs.top, batch))


class _Root(torch.nn.Module):
    """The module and the loss in one `forward`, so that what wraps it (DDP, FSDP) sees every use of a parameter."""

    def __init__(self, module: torch.nn.Module, runner: ModuleRunner) -> None:
        super().__init__()
        self.module = module
        self.call: Callable[..., Any] = runner.compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return (sum, count, outputs) of a micro-batch, or what a pipeline stage gives."""
        return self.call(*args, **kwargs)


def _from_logits(logits_nv: torch.Tensor, batch: MicroBatch, *, keep: bool) -> TokenOutputs:
    shape = batch.targets_BT.shape
    logprobs_n, is_top_n = _pick(logits_nv, batch.targets_N)
    return TokenOutputs(
        logprobs=_spread(logprobs_n, batch.place_N, shape), is_top=_spread(is_top_n, batch.place_N, shape),
        logits=_spread(logits_nv, batch.place_N, shape) if keep else None)


def _pick(logits_nv: torch.Tensor, targets_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits_nv if logits_nv.dtype == torch.float64 else logits_nv.float()
    log_softmax = torch.log_softmax(wide, -1)
    logprobs_n = log_softmax.gather(1, targets_n[:, None])[:, 0]
    return logprobs_n, logprobs_n.detach() >= log_softmax.detach().amax(-1)


def _spread(values_n: torch.Tensor, place_n: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return [B, T, ...] with the values at their places and 0 elsewhere."""
    spread = values_n.new_zeros((*shape, *values_n.shape[1:]))
    return spread.index_put((place_n // shape[1], place_n % shape[1]), values_n)  # not a view of it, of which FSDP would warn


def _likeliest(logits: Iterable[torch.Tensor], count: int, batch: MicroBatch) -> Alternatives:
    """Return the `count` likeliest tokens in the place of each target, of logits [N, V] that come in pieces."""
    found: list[Any] = [torch.log_softmax(piece if piece.dtype == torch.float64 else piece.float(), -1).topk(count)
                        for piece in logits]
    shape = batch.targets_BT.shape
    return Alternatives(ids=_spread(torch.cat([top.indices for top in found]), batch.place_N, shape),
                        logprobs=_spread(torch.cat([top.values for top in found]), batch.place_N, shape))


def _top_by_sequence(top: Alternatives, batch: MicroBatch) -> list[list[dict[int, float]]]:
    ids, logprobs, is_target = top.ids.tolist(), top.logprobs.tolist(), (batch.targets_BT != IGNORE_INDEX).tolist()
    return [[{}, *(dict(zip(ids[row][t], logprobs[row][t], strict=True)) if is_target[row][t] else {} for t in range(length - 1))]
            for row, length in enumerate(batch.lengths)]


def _by_sequence(flat: list[float], batch: MicroBatch) -> list[list[float]]:
    """Return the log-probabilities at the token they speak about: nothing precedes the first."""
    width = batch.targets_BT.shape[1]
    return [[0.0, *flat[row * width: row * width + length - 1]] for row, length in enumerate(batch.lengths)]
