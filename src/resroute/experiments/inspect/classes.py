"""Classes of tokens by what they are in a text: starts of words, insides of words, spaces, .."""

from collections.abc import Callable

import torch
from torch import Tensor

from resroute.data import Tokenizer

CLASSES = (
    "start of a word",
    "inside a word",
    "space",
    "line break",
    "digit",
    "punctuation",
    "end of text",
    "other",
)
_PLACE = {name: place for place, name in enumerate(CLASSES)}


def token_classes(tokenizer: Tokenizer) -> Callable[[Tensor], Tensor]:
    """Make a function from token ids (B, T) to positions in `CLASSES` (B, T).

    A token is what its first visible character is. Letters start a word after anything else, at
    the start of a window, and where their token begins with a space.
    """
    pieces = [_piece(tokenizer, i) for i in range(tokenizer.vocab_size)]
    kinds = torch.tensor([_PLACE[_kind(piece)] for piece in pieces])
    opens = torch.tensor([piece[:1].isspace() for piece in pieces])
    ends_in_letter = torch.tensor([piece[-1:].isalpha() for piece in pieces])
    inside = _PLACE["inside a word"]

    def classify(ids: Tensor) -> Tensor:
        home = ids.device
        found = kinds.to(home)[ids]
        goes_on = torch.zeros_like(ids, dtype=torch.bool)
        goes_on[:, 1:] = ends_in_letter.to(home)[ids[:, :-1]]
        goes_on &= ~opens.to(home)[ids]
        return torch.where((found == _PLACE["start of a word"]) & goes_on, inside, found)

    return classify


def _piece(tokenizer: Tokenizer, token: int) -> str:
    return "" if token == tokenizer.end_of_text else tokenizer.decode([token])


def _kind(piece: str) -> str:
    if not piece:
        return "end of text"
    shown = piece.strip()
    if not shown:
        return "line break" if "\n" in piece or "\r" in piece else "space"
    first = shown[0]
    if first.isalpha():
        return "start of a word"
    if first.isdecimal():
        return "digit"
    # also half of a character, which decodes to the sign for what is not a character
    return "punctuation" if first.isprintable() and first != "\ufffd" else "other"
