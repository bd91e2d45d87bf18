"""Preprocessors: rows to conversations."""

from typing import TYPE_CHECKING

from twinkle_core.preprocessor.interface import Preprocessor as Preprocessor

if TYPE_CHECKING:
    from twinkle_core.preprocessor.builtin import AlpacaProcessor as AlpacaProcessor
    from twinkle_core.preprocessor.builtin import GSM8KProcessor as GSM8KProcessor
    from twinkle_core.preprocessor.builtin import SelfCognitionProcessor as SelfCognitionProcessor
else:
    from twinkle_core.registry import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, kind="preprocessors")
