"""Text from a trained model."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from resroute.config import UserError
from resroute.data import CharTokenizer, Tokenizer
from resroute.model import GPT, generate


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Tokens of a prompt; an empty one stands for the start of a document.

    Raises:
        UserError: A character that the vocabulary does not have.
    """
    if prompt:
        return [int(i) for i in tokenizer.encode(prompt)]
    if tokenizer.end_of_text is not None:
        return [tokenizer.end_of_text]
    # without documents a line break, or else a space, opens a text best
    if isinstance(tokenizer, CharTokenizer):
        usual = [tokenizer.symbols.index(c) for c in "\n " if c in tokenizer.symbols]
        return [usual[0] if usual else 0]
    return [int(i) for i in tokenizer.encode("\n")][:1] or [0]


def sample(
    model: GPT,
    tokenizer: Tokenizer,
    *,
    prompt: str = "",
    count: int = 1,
    max_new_tokens: int = 300,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[str] = (),
    seed: int | None = 0,
    on_text: Callable[[str], None] | None = None,
) -> list[str]:
    """Continue a prompt `count` times; a text also ends at the end of its document.

    Args:
        model: A trained model.
        tokenizer: The one that it was trained with.
        prompt: Opening text, part of each result; empty for the start of a document.
        count: Continuations, drawn together.
        max_new_tokens: Most tokens to add.
        temperature: See `generate`, as `top_k` and `top_p`.
        top_k: See `generate`.
        top_p: See `generate`.
        stop: A text ends once it contains one of these, which it keeps.
        seed: Of the draws.
        on_text: Called with each new piece of the text, where `count` is one.

    Raises:
        UserError: Unknown characters, or settings out of range.
    """
    if count < 1:
        raise UserError(f"count must be at least 1, got {count}")
    stops = [[int(i) for i in tokenizer.encode(text)] for text in stop if text]
    if tokenizer.end_of_text is not None:
        stops.append([tokenizer.end_of_text])

    pieces = _Pieces(tokenizer)

    def emit(tokens: Tensor) -> None:
        if on_text is None or count > 1 or tokens[0] == tokenizer.end_of_text:
            return
        if text := pieces.add(tokens.tolist()):
            on_text(text)

    opening = prompt_ids(tokenizer, prompt)
    rows = generate(
        model,
        torch.tensor([opening] * count),
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stops,
        seed=seed,
        stream=emit,
    )
    if on_text is not None and (rest := pieces.rest()):
        on_text(rest)
    return [prompt + _continuation(tokenizer, row[len(opening) :]) for row in rows]


class _Pieces:
    """Text of tokens as they come; what may be part of a character waits for the rest of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: list[int] = []

    def add(self, ids: list[int]) -> str:
        """Text that is whole by now."""
        self._waiting += ids
        text = self._tokenizer.decode(self._waiting)
        # four bytes are the most that a character has
        if text.endswith("\ufffd") and len(self._waiting) < 4:
            return ""
        self._waiting = []
        return text

    def rest(self) -> str:
        """What is left at the end."""
        text = self._tokenizer.decode(self._waiting)
        self._waiting = []
        return text


def _continuation(tokenizer: Tokenizer, tokens: Tensor) -> str:
    ids = [i for i in tokens.tolist() if i != tokenizer.end_of_text]
    return tokenizer.decode(ids)
