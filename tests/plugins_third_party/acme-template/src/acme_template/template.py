"""A chat template that replaces the tokenizer's own."""

from pathlib import Path
from typing import Any

from twinkle_core.template.template import Template


class AcmeTemplate(Template):
    """Chats with `[user]` and `[assistant]` headers, whatever the tokenizer's own template is."""

    def __init__(self, model_id: str, **options: Any) -> None:
        super().__init__(model_id, **{"chat_template": Path(__file__).with_name("chat.jinja"), **options})
