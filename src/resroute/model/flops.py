"""How many operations a model takes, from its shape alone.

D width, H query heads, G key-value heads, L layers, T tokens of a full context, V vocabulary.
"""

from resroute.model.gpt import GPTConfig


def flops_per_token(config: GPTConfig) -> int:
    r"""Floating-point operations of one token, forward and backward, in a full context.

    $$ 6\,P + 12\,L\,D\,T $$

    The usual count of model FLOP utilisation (PaLM, Chowdhery et al. 2022, appendix B): $P$ are the
    parameters of matrix products, the head's among them, tied or not, the embedding's not; the
    second term is the scores and mixes of attention, without halving them for what is masked. A
    product takes 2 operations a parameter forward and 4 backward; norms, activations and softmaxes
    are not counted, nor is what is computed twice to save memory.

    Routing over depth is left out on purpose: methods are then compared by the same number, and
    what one of them adds to a step shows as a lower utilisation.
    """
    dim = config.dim
    kv_dim = dim // config.num_heads * (config.num_kv_heads or config.num_heads)
    attention = 2 * dim * dim + 2 * dim * kv_dim
    # a gated MLP has one more projection up
    mlp = (3 if config.mlp == "swiglu" else 2) * dim * config.hidden_dim
    products = config.num_layers * (attention + mlp) + dim * config.vocab_size
    return 6 * products + 12 * config.num_layers * dim * config.context
