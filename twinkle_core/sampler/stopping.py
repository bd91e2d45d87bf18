"""When a completion ends, and what its text is: end tokens and stop strings.

A stop string may straddle tokens, or end inside one, so it is looked for in the decoded text. Drawing tokens is left to
`decoding`.
"""

from collections.abc import Collection, Sequence
from typing import Any

from twinkle_core.data_format import SamplingParams

_MARGIN = 8
"""Tokens decoded in front of a stop string's longest possible match: the first of a window may be half a character."""


class StopRule:
    """Ends completions of one call.

    Args:
        tokenizer: turns tokens into text.
        stop_token_ids: tokens that end a completion.
        params: holds the stop strings. One that is a special token of the tokenizer, such as "<|im_end|>", ends the completion by
            its id: special tokens are not part of the text.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Collection[int], params: SamplingParams) -> None:
        self.tokenizer = tokenizer
        special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        special.update(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._special = frozenset(special.values())
        self._ids = frozenset(stop_token_ids) | {special[text] for text in params.stop if text in special}
        self._strings = tuple(text for text in params.stop if text not in special)
        # every token of the text is at least one byte of it
        self._window = max((len(text.encode()) for text in self._strings), default=0) + _MARGIN

    def is_stop(self, tokens: Sequence[int]) -> bool:
        """Whether the last of `tokens` ends the completion."""
        if tokens[-1] in self._ids:
            return True
        if not self._strings:
            return False
        window: list[int] = []
        for token in reversed(tokens):
            if token not in self._special:
                window.append(token)
                if len(window) == self._window:
                    break
        text = self._decode(window[::-1])
        return any(string in text for string in self._strings)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens, up to the first stop string."""
        text = self._decode(tokens)
        return text[:min((place for string in self._strings if (place := text.find(string)) >= 0), default=len(text))]

    def certain_text(self, tokens: Sequence[int]) -> str:
        """Return the part of `text` that further tokens cannot change: no half character, nothing that may begin a stop string."""
        text = self.text(tokens).rstrip("\ufffd")
        held = max((length for string in self._strings for length in range(1, len(string)) if text.endswith(string[:length])),
                   default=0)
        return text[:len(text) - held]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
