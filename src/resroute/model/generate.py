"""Sampling from a model with a key-value cache."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from resroute.config import UserError
from resroute.model.gpt import GPT

PADDING = -1


# no_grad, not inference_mode: what it returns may be trained on
@torch.no_grad()
def generate(
    model: GPT,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[Sequence[int]] = (),
    seed: int | None = None,
    stream: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Continue a batch of prompts.

    Past the context, the oldest half of it is dropped and the rest is encoded again.

    Args:
        model: Any GPT; it is in evaluation mode meanwhile.
        ids: (B, T) prompts of equal length, at least one token each.
        max_new_tokens: Most tokens to add.
        temperature: Divides the logits; zero takes the likeliest token.
        top_k: Draw among this many likeliest tokens.
        top_p: Draw among the likeliest tokens that together reach this probability.
        stop: A row ends once it ends with any of these sequences of token ids, which it keeps.
        seed: Seeds the draws; None uses torch's global generator.
        stream: Called with each step's new tokens (B,), -1 for rows that have ended.

    Returns:
        (B, T + n) prompts with their continuations, on the device of `ids`; rows that ended
        early are padded with -1.

    Raises:
        UserError: A prompt without tokens or with unknown ones, a `stop` that is not sequences of
            token ids, or settings out of range.
    """
    _check(ids, max_new_tokens, temperature, top_k, top_p, stop, model.config.vocab_size)
    device = model.embedding.weight.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        rows = ids.to(device)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        window = _Window(model)
        for _ in range(max_new_tokens):
            logits = window.next_logits(rows)
            new = _draw(logits, temperature, top_k, top_p, generator)
            new = torch.where(ended, PADDING, new)
            rows = torch.cat((rows, new.unsqueeze(1)), dim=1)
            if stream is not None:
                stream(new)
            for sequence in stop:
                ended |= _ends_with(rows[:, ids.shape[1] :], sequence)
            if ended.all():
                break
        return rows.to(ids.device)
    finally:
        model.train(was_training)


class _Window:
    """The latest tokens of growing rows, of which the model has encoded all but the newest."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.begin = 0
        self.cache = model.new_cache()

    def next_logits(self, rows: Tensor) -> Tensor:
        """Logits (B, V) of the token after rows (B, T), which only ever grow; -1 reads as 0."""
        context = self.model.config.context
        while rows.shape[1] - self.begin > context:
            self.begin += (context + 1) // 2
            self.cache = self.model.new_cache()
        unseen = rows[:, self.begin + self.cache.length :]
        return self.model.next_logits(unseen.clamp(min=0), self.cache)


def _draw(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    # likeliest first, and the lower token first among equals, as argmax has it
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ordered = ordered[:, :top_k]
    # shifted and bounded, so that tiny temperatures make no infinity
    smallest = torch.finfo(logits.dtype).tiny
    probabilities = ((ordered - ordered[:, :1]) / max(temperature, smallest)).softmax(-1)
    if top_p is not None and top_p < 1:
        # a token stays while those before it do not reach top_p, the likeliest in any case
        dropped = probabilities.cumsum(-1) - probabilities >= top_p
        dropped[:, 0] = False
        probabilities = probabilities.masked_fill(dropped, 0.0)
    rank = torch.multinomial(probabilities, 1, generator=generator)
    return order.gather(-1, rank).squeeze(-1)


def _ends_with(rows: Tensor, sequence: Sequence[int]) -> Tensor:
    if rows.shape[1] < len(sequence):
        return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    tail = torch.tensor(list(sequence), device=rows.device)
    return (rows[:, rows.shape[1] - len(sequence) :] == tail).all(-1)


def _check(
    ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop: Sequence[Sequence[int]],
    vocab_size: int,
) -> None:
    if ids.dim() != 2 or 0 in ids.shape:
        raise UserError(
            f"generate needs prompts of shape (batch, tokens) with at least one token each, got "
            f"shape {tuple(ids.shape)}"
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise UserError(
            f"prompts must hold tokens 0 to {vocab_size - 1}, got {int(ids.min())} to "
            f"{int(ids.max())} (-1 pads rows that ended early)"
        )
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature must be at least 0 and finite, got {temperature}")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p must be above 0 and at most 1, got {top_p}")
    for sequence in stop if isinstance(stop, Iterable) else (stop,):
        if not _are_tokens(sequence):
            raise UserError(
                "stop takes sequences of token ids, such as [tokenizer.encode('ab')], got "
                f"{sequence!r} in it"
            )
        if not len(sequence):
            raise UserError("a stop sequence needs at least one token; leave empty ones out")


def _are_tokens(sequence: Any) -> bool:
    """Whether something is a sequence of whole numbers, whatever type counts them."""
    try:
        for token in sequence:
            operator.index(token)
    except TypeError:
        return False
    return True
