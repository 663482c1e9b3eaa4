"""A decoder-only Transformer that takes any residual method, and sampling from it."""

from resroute.model.attention import Cache as Cache
from resroute.model.generate import generate as generate
from resroute.model.gpt import GPT as GPT
from resroute.model.gpt import GPTConfig as GPTConfig
from resroute.model.gpt import outline as outline
from resroute.model.presets import PRESETS as PRESETS
from resroute.model.presets import paper as paper
from resroute.model.presets import small as small
from resroute.model.presets import tiny as tiny

__all__ = [
    "GPT",
    "PRESETS",
    "Cache",
    "GPTConfig",
    "generate",
    "outline",
    "paper",
    "small",
    "tiny",
]
