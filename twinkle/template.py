"""Chat templates: conversations to tokens and labels, and back."""

from typing import TYPE_CHECKING

from twinkle_core.template.template import Template as Template

if TYPE_CHECKING:
    from twinkle_qwen.templates import Qwen2_5Template as Qwen2_5Template
    from twinkle_qwen.templates import Qwen3_5Template as Qwen3_5Template
    from twinkle_qwen.templates import Qwen3Template as Qwen3Template
else:
    from twinkle_core.registry import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, kind="templates")
