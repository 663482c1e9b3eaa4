"""What a step keeps for its backward pass, from shapes alone: bytes of tensors, by arithmetic.

For PreNorm, Block AttnRes and WAV as they run on fast kernels (docs/engine.md), uncompiled, on a
device that multiplies in the run's precision. Dropout's masks and what `qk_norm` keeps are left
out. `narrow` is the bytes of a number in matrix products.

R rows (tokens of a micro-batch), D width, L layers, V vocabulary.
"""

import functools
from typing import Any

from resroute.config import UserError
from resroute.model import GPTConfig, outline
from resroute.residual import WAV, BlockAttnRes, PreNorm
from resroute.residual.running import RunningPlan, S, running_plan

WIDE = 4
"""Bytes of a number of streams and softmaxes, and of weights, whatever a run's precision."""
SMALL_LOGITS = 8 * 2**20
"""Bytes up to which `model.loss` keeps all logits."""


built = functools.lru_cache(maxsize=16)(outline)
"""`model.outline`, remembered."""


def num_bases(config: GPTConfig) -> int:
    """Sources that a finished block gives: its sum and its details."""
    return 1 + len(config.residual.bases) if isinstance(config.residual, WAV) else 1


def blocks_of(config: GPTConfig) -> list[tuple[range, RunningPlan]]:
    """Sites of each block and the streams that its sums are kept in; none for PreNorm.

    Raises:
        UserError: Another method, or an option that keeps more.
    """
    method = config.residual
    if isinstance(method, PreNorm):
        return []
    if not isinstance(method, BlockAttnRes | WAV) or method.gated:
        gated = "gated " if getattr(method, "gated", False) else ""
        raise UserError(f"plans know PreNorm, Block AttnRes and WAV, got {gated}{method.label}")
    policy: Any = built(config).policy
    signs = getattr(policy, "signs", None) or [()] * policy.num_sites
    plans = [running_plan(signs[block.start : block.stop]) for block in policy.blocks]
    if None in plans or getattr(method, "learn_bases", False):
        raise UserError(
            "plans know WAV with one pattern of signs, split and duplicate, not learned"
        )
    return [(b, plan) for b, plan in zip(policy.blocks, plans, strict=True) if plan is not None]


def kept_by_streams(config: GPTConfig, narrow: int) -> int:
    """Bytes a token that the residual method keeps: sums, sources, mixes of sources, scalars."""
    sites, dim, bases, blocks = (
        2 * config.num_layers,
        config.dim,
        num_bases(config),
        blocks_of(config),
    )
    if not blocks:
        return WIDE * (dim * (sites + 1) + 2 * sites)
    wide, scalars = _sources(config)
    finished = 1
    for block, plan in blocks:
        size = len(block)
        # each site but the first has added an update to a stream; the sum at the half is a tensor
        # of its own where it is the sum of two
        wide += size - 1 + (_half(plan) == (S, 0))
        # the log-sum-exp and logits of finished sources; numbers of the norm and of each basis
        scalars += size * (1 + finished + 2) + (size - 1) * 4 * bases
        finished += bases
    return dim * (WIDE * wide + narrow * sites) + WIDE * scalars


def kept_between_layers(config: GPTConfig, narrow: int) -> int:
    """Bytes a token that layers hand on, each tensor once: what activation checkpointing keeps."""
    layers, dim, blocks = config.num_layers, config.dim, blocks_of(config)
    if not blocks:
        # sums, each with an update that the next read adds
        return dim * (WIDE * (layers + 1) + narrow * (layers - 1))
    wide, scalars = _sources(config)
    # mixes of finished sources with their log-sum-exps; the first block's are made with logits
    kept = 2 * layers
    scalars += 2 * layers + len(blocks[0][0])
    for block, plan in blocks:
        versions = set()
        for written in range(2, len(block), 2):
            *earlier, last = plan.stream_of[:written]
            waits = last in plan.moments[written - 1].streams
            added = earlier if waits else [*earlier, last]
            kept += waits
            for stream in plan.moments[written].streams:
                versions.add(_half(plan) if stream == S else (stream, added.count(stream)))
        wide += len(versions)
    return dim * (WIDE * wide + narrow * kept) + WIDE * scalars


def kept_by_sublayers(config: GPTConfig, narrow: int) -> int:
    """Bytes a token that attention and MLP of a layer keep."""
    kv_dim = config.dim // config.num_heads * (config.num_kv_heads or config.num_heads)
    # the read; queries, keys, values; what was attended, with a log-sum-exp a head
    attention = narrow * (3 * config.dim + 2 * kv_dim) + WIDE * config.num_heads
    # both halves of a gated projection, the gate's activation and the product
    hidden = (4 if config.mlp == "swiglu" else 2) * config.hidden_dim
    return attention + narrow * (config.dim + hidden)


def kept_at_ends(config: GPTConfig, rows: int, narrow: int) -> int:
    """Bytes that token ids, the final norm, the head and the loss keep of R rows."""
    kept = WIDE * rows * config.vocab_size
    head = narrow * config.vocab_size * config.dim
    if kept > SMALL_LOGITS:
        # no logits; the head's gradient is there from the forward pass on
        kept = head
    elif narrow < WIDE:
        kept += head
    return kept + rows * (2 * 8 + (WIDE + narrow) * config.dim + WIDE)


def _sources(config: GPTConfig) -> tuple[int, int]:
    """Tensors of width D, and scalars, a token: embedding, finished blocks' sources, readout."""
    bases, num_blocks = num_bases(config), len(blocks_of(config))
    sources = 1 + bases * num_blocks
    reads_all = getattr(config.residual, "details_in_readout", False)
    read = sources if reads_all else 1 + num_blocks
    # the last block's details are for the readout alone
    unread = 0 if reads_all else bases - 1
    # 1 / rms of each, the details' matching, the readout's logits and their log-sum-exp
    return sources - unread + 1, sources - unread + (bases - 1) * num_blocks - unread + read + 1


def _half(plan: RunningPlan) -> tuple[int, int] | None:
    """S as a stream and its number of updates: S itself where it is a sum of two streams."""
    if plan.snapshot is None:
        return None
    streams = plan.moments[plan.snapshot].streams
    return (streams[0], plan.snapshot) if len(streams) == 1 else (S, 0)
