"""Of each token of one text, from which depth every site reads it.

T tokens, S sources.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from resroute.config import UserError
from resroute.data import Tokenizer
from resroute.experiments.importance import logits_of
from resroute.experiments.sample import prompt_ids
from resroute.residual import Policy
from resroute.residual.base import STREAM, policy_of, site_name
from resroute.residual.capture import capture


@dataclass(frozen=True, kw_only=True)
class SiteReads:
    """What one site, or the readout, reads at each token."""

    name: str
    sources: tuple[str, ...]
    depths: tuple[float, ...]
    """Of each source, in layers: see `source_depths`."""
    weights: tuple[tuple[float, ...], ...]
    """Of each token, one number a source; they sum to one."""


@dataclass(frozen=True, kw_only=True)
class TokenReads:
    """A text as its tokens, and where each was read from."""

    tokens: tuple[str, ...]
    losses: tuple[float | None, ...]
    """Nats of each token, given those before it; None of the first."""
    sites: tuple[SiteReads, ...]
    """Those that mix sources, the readout last; none of a method that does not route."""


def shown_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text; of an empty one what opens a document.

    Raises:
        UserError: Characters that the vocabulary does not have, or none that it has.
    """
    ids = prompt_ids(tokenizer, text)
    if not ids:
        raise UserError("the vocabulary has none of the prompt's characters; give another prompt")
    return ids


@torch.no_grad()
def token_reads(model: nn.Module, tokenizer: Tokenizer, ids: list[int]) -> TokenReads:
    """Run a text through a model and keep the depth weights of each token.

    Args:
        model: In evaluation mode; as `inspect_model` takes it.
        tokenizer: The model's.
        ids: The text's tokens, at least one, and no more than the context holds.
    """
    rows = torch.tensor([ids], device=next(model.parameters()).device)
    with capture(model, keep_tokens=True) as seen:
        logits = logits_of(model, rows)[0].float()
    losses = F.cross_entropy(logits[:-1], rows[0, 1:], reduction="none").tolist()
    policy = policy_of(model)
    return TokenReads(
        tokens=tuple(tokenizer.decode([i]) for i in ids),
        losses=(None, *losses),
        sites=tuple(_site(policy, site, rows) for site, rows in sorted(seen.latest.items())),
    )


def source_depths(policy: Policy[Any], site: int) -> dict[str, float]:
    """How deep each source of a site lies, in layers.

    The embedding lies at 0 and the update of site s of K a layer at (s + 1) / K; a sum or detail
    of several updates at their mean.
    """
    blocks: list[range] = getattr(policy, "blocks", [])
    found = {}
    for name in policy.source_names(site):
        if name == STREAM or name == "embedding":
            found[name] = 0.0
            continue
        number = re.search(r" (\d+)$", name)
        if number:
            first, last = blocks[int(number[1])].start, blocks[int(number[1])].stop - 1
        else:
            (block,) = (one for one in blocks if one.start < site <= one.stop)
            first, last = block.start, site - 1
        found[name] = (0.5 * (first + last) + 1) / len(policy.kinds)
    return found


def _site(policy: Policy[Any], site: int, weights: Tensor) -> SiteReads:
    depths = source_depths(policy, site)
    return SiteReads(
        name=site_name(policy, site),
        sources=tuple(depths),
        depths=tuple(depths.values()),
        weights=tuple(map(tuple, weights.tolist())),
    )
