"""A causal language model from an id: any Hugging Face architecture, and the text model of a vision-language checkpoint.

Where the files come from is the hub's business; what is trained of the model, and in which dtype, the caller's.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from twinkle_core import session, settings
from twinkle_core.errors import MissingExtraError, ModelError, TwinkleError, check_flag, first_line
from twinkle_core.hub import resolve_model

if TYPE_CHECKING:
    import torch

_SEEDED = "twinkle_core.model.seeded"


def load_pretrained(
    model_id: str,
    *,
    dtype: "torch.dtype | None" = None,
    device: str = "cpu",
    attn_implementation: str | None = None,
    trust_remote_code: bool | None = None,
) -> "torch.nn.Module":
    """Return the causal language model of `model_id` on `device`, in eval mode.

    Args:
        model_id: as `twinkle_core.hub.resolve_model` takes it.
        dtype: of the weights; None keeps the checkpoint's.
        device: where it is put.
        attn_implementation: as transformers takes it, e.g. "sdpa"; None leaves it to transformers.
        trust_remote_code: whether code that ships with the model may run; None asks the environment variable.

    Raises:
        HubError: it cannot be found.
        ModelError: it is no causal language model, or its files do not hold all of its weights.
    """
    transformers = _import_transformers()
    module = build(transformers.AutoModelForCausalLM, model_id, dtype=dtype, device=device, attn_implementation=attn_implementation,
                   trust_remote_code=trust_remote_code)
    return module.to(device).eval()


def build(
    auto_class: Any, model_id: str, *, dtype: "torch.dtype | None", device: str, attn_implementation: str | None,
    trust_remote_code: bool | None,
) -> Any:
    """Return what `auto_class.from_pretrained` makes of `model_id`, complete. Arguments and errors: `load_pretrained`."""
    check_flag("trust_remote_code", trust_remote_code, none="as `TWINKLE_TRUST_REMOTE_CODE` says")
    _import_transformers()
    _leave_out_kernel_advice()
    folder = resolve_model(model_id, trust_remote_code=trust_remote_code)
    trusted = settings.trust_remote_code() if trust_remote_code is None else trust_remote_code
    options: dict[str, Any] = {"dtype": "auto" if dtype is None else dtype, "trust_remote_code": trusted, "local_files_only": True}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    try:
        with seeded(device), without_progress_bar():
            module, info = auto_class.from_pretrained(str(folder), output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        if isinstance(error, TwinkleError):
            raise
        raise ModelError(f"`{model_id}` (in {folder}) cannot be loaded as a causal language model: {first_line(error)}. Check that "
                         "its `config.json` names a text model that this version of transformers knows.") from error
    _check_complete(model_id, folder, info)
    _choose_experts(module)
    return module


@contextlib.contextmanager
def seeded(device: str, *, salt: int = 0) -> Iterator[None]:
    """Draw random numbers from the session's seed plus `salt` inside the block, and leave the generators as they were."""
    import torch

    devices = [torch.device(device)] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(session.current().seed + salt)
        yield


def seed_once(*, salt: int = 0) -> None:
    """Seed torch's global generators with the session's seed plus `salt`, the first time in a session: what dropout draws from."""
    import torch

    current = session.current()
    if not current.state.get(_SEEDED):
        current.state[_SEEDED] = True
        torch.manual_seed(current.seed + salt)


def _import_transformers() -> Any:
    try:
        import peft  # noqa: F401
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise MissingExtraError(f"Training needs `{error.name}`, which is not installed. "
                                "Run: pip install 'twinkle-core[train]'") from error
    return transformers


@contextlib.contextmanager
def without_progress_bar() -> Iterator[None]:
    """Keep transformers from showing one inside the block."""
    from transformers.utils import logging as switch

    was_enabled = switch.is_progress_bar_enabled()
    switch.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            switch.enable_progress_bar()


def _leave_out_kernel_advice() -> None:
    """Keep transformers from advising GPU kernels on a machine without a GPU, where its reference code is all there is.

    For the whole process, as the advice may come at any forward pass; docs/training.md says so. Adding a filter twice adds it once.
    """
    import torch

    if not torch.cuda.is_available():
        logging.getLogger("transformers.integrations.hub_kernels").addFilter(_is_no_kernel_advice)


def _is_no_kernel_advice(record: logging.LogRecord) -> bool:
    return "falling back to its reference PyTorch implementation" not in record.getMessage()


def _choose_experts(module: Any) -> None:
    """Run the experts of a mixture one by one in fp64, which torch's grouped matrix product does not know."""
    import torch

    if module.dtype == torch.float64 and getattr(module.config.get_text_config(), "_experts_implementation", None) == "grouped_mm":
        module.set_experts_implementation("eager")


def _check_complete(model_id: str, folder: Any, info: Any) -> None:
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        shown = ", ".join(f"`{name}`" for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelError(f"The files of `{model_id}` in {folder} lack {len(missing)} weights of the model: {shown}. They would be "
                         "random numbers. Fetch the model again, or name one whose files match its `config.json`.")
