"""From resroute's GPT to its form in transformers and back, with the same weights."""

import warnings

import torch
from torch import Tensor

from resroute.config import UserError, from_dict, to_dict
from resroute.hf.configuration_resroute import ResrouteConfig
from resroute.hf.modeling_resroute import ResrouteForCausalLM
from resroute.model import GPT, GPTConfig, outline

# parts of a GPT by their names here; all others are below `model.`
_HEAD = {"head.weight": "lm_head.weight"}


def hf_config(config: GPTConfig, *, end_of_text: int | None = None) -> ResrouteConfig:
    """The configuration of a GPT as transformers has it.

    Args:
        config: Shape of the model.
        end_of_text: Token that opens and ends documents; it also fills rows of a batch.
    """
    return ResrouteConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.context,
        residual=to_dict(config.residual),
        mlp=config.mlp,
        position=config.position,
        qk_norm=config.qk_norm,
        dropout=config.dropout,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )


def gpt_config(config: ResrouteConfig) -> GPTConfig:
    """The configuration of a model of transformers as resroute has it.

    Raises:
        UserError: A shape that resroute's GPT does not have.
    """
    ratio = config.intermediate_size / config.hidden_size
    if int(ratio * config.hidden_size) != config.intermediate_size:
        # rounded down on the way
        ratio = (config.intermediate_size + 0.5) / config.hidden_size
    kv_heads = config.num_key_value_heads
    values = {
        "vocab_size": config.vocab_size,
        "context": config.max_position_embeddings,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "dim": config.hidden_size,
        "mlp": config.mlp,
        "mlp_ratio": ratio,
        "num_kv_heads": None if kv_heads == config.num_attention_heads else kv_heads,
        "position": config.position,
        "qk_norm": config.qk_norm,
        "tie_embeddings": config.tie_word_embeddings,
        "dropout": config.dropout,
        "norm_eps": config.rms_norm_eps,
        "residual": config.residual,
    }
    return from_dict(GPTConfig, values, where="config.json")


def from_gpt(model: GPT, *, end_of_text: int | None = None) -> ResrouteForCausalLM:
    """A GPT as a model of transformers, in evaluation mode.

    Args:
        model: Its weights are copied.
        end_of_text: See `hf_config`.
    """
    with torch.device("meta"):
        made = ResrouteForCausalLM(hf_config(model.config, end_of_text=end_of_text))
    weights = {
        _HEAD.get(name, f"model.{name}"): tensor.detach().clone()
        for name, tensor in model.state_dict().items()
    }
    if model.config.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embedding.weight"]
    made.load_state_dict(weights, assign=True)
    made.tie_weights()
    made.eval()  # type: ignore[no-untyped-call]
    return made


def to_gpt(model: ResrouteForCausalLM) -> GPT:
    """A model of transformers as a GPT, in evaluation mode, with copies of its weights.

    Raises:
        UserError: A model of another class, or a shape that resroute's GPT does not have.
    """
    if type(model).__name__ != "ResrouteForCausalLM":
        raise UserError(f"needs a ResrouteForCausalLM, got {type(model).__name__}")
    config = gpt_config(model.config)
    with warnings.catch_warnings():
        # notes on the shape were for its training
        warnings.simplefilter("ignore")
        made = outline(config)
    theirs: dict[str, Tensor] = model.state_dict()
    made.load_state_dict(
        {
            name: theirs[_HEAD.get(name, f"model.{name}")].detach().clone()
            for name in made.state_dict()
        },
        assign=True,
    )
    return made.eval()
