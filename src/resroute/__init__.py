"""Residual routing: how a deep decoder-only Transformer carries information over depth.

```python
import resroute as rr

policy = rr.WAV(num_blocks=4).build(num_layers=48, dim=512)
stream = policy.start(embedding)
for site, sublayer in enumerate(sublayers):
    stream = policy.write(stream, site, sublayer(policy.read(stream, site)))
hidden = policy.finish(stream)
```

Loaded when they are first asked for: `importance`; and, for models of Hugging Face transformers
(the extra `hf`), `convert`, `unconvert` and `from_pretrained`.
"""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING
from typing import Any as _Any

from resroute.config import UserError as UserError
from resroute.data import CharTokenizer as CharTokenizer
from resroute.data import StoryConfig as StoryConfig
from resroute.data import SubwordTokenizer as SubwordTokenizer
from resroute.data import open_corpus as open_corpus
from resroute.data import prepare_storyworld as prepare_storyworld
from resroute.data import prepare_text as prepare_text
from resroute.model import GPT as GPT
from resroute.model import Cache as Cache
from resroute.model import GPTConfig as GPTConfig
from resroute.model import generate as generate
from resroute.model import paper as paper
from resroute.model import small as small
from resroute.model import tiny as tiny
from resroute.ops import backend as backend
from resroute.ops import set_backend as set_backend
from resroute.residual import HAARES as HAARES
from resroute.residual import WAV as WAV
from resroute.residual import BlockAttnRes as BlockAttnRes
from resroute.residual import DeltaAttnRes as DeltaAttnRes
from resroute.residual import FullAttnRes as FullAttnRes
from resroute.residual import LayerScale as LayerScale
from resroute.residual import Policy as Policy
from resroute.residual import PreNorm as PreNorm
from resroute.residual import ResidualConfig as ResidualConfig
from resroute.residual import ReZero as ReZero
from resroute.residual import RoutedStack as RoutedStack
from resroute.residual import capture as capture
from resroute.residual import health as health
from resroute.residual import interchange as interchange
from resroute.residual import trajectory as trajectory
from resroute.residual import without_layer as without_layer
from resroute.residual import without_sites as without_sites
from resroute.residual import without_sources as without_sources
from resroute.training import Listener as Listener
from resroute.training import Preempted as Preempted
from resroute.training import RunStart as RunStart
from resroute.training import TrainConfig as TrainConfig
from resroute.training import load as load
from resroute.training import train as train

if TYPE_CHECKING:
    from resroute.experiments.importance import importance as importance
    from resroute.hf.convert import convert as convert
    from resroute.hf.convert import unconvert as unconvert
    from resroute.hf.load import from_pretrained as from_pretrained
del TYPE_CHECKING

__version__ = _version("resroute")

__all__ = [
    "GPT",
    "HAARES",
    "WAV",
    "BlockAttnRes",
    "Cache",
    "CharTokenizer",
    "DeltaAttnRes",
    "FullAttnRes",
    "GPTConfig",
    "LayerScale",
    "Listener",
    "Policy",
    "PreNorm",
    "Preempted",
    "ReZero",
    "ResidualConfig",
    "RoutedStack",
    "RunStart",
    "StoryConfig",
    "SubwordTokenizer",
    "TrainConfig",
    "UserError",
    "__version__",
    "backend",
    "capture",
    "generate",
    "health",
    "importance",
    "interchange",
    "load",
    "open_corpus",
    "paper",
    "prepare_storyworld",
    "prepare_text",
    "set_backend",
    "small",
    "tiny",
    "train",
    "trajectory",
    "without_layer",
    "without_sites",
    "without_sources",
]


# rooms with much that a model does not need; those of `hf` are not in `__all__`, since they need
# another package
_LAZY = {
    "importance": "resroute.experiments.importance",
    "convert": "resroute.hf.convert",
    "unconvert": "resroute.hf.convert",
    "from_pretrained": "resroute.hf.load",
}


def __getattr__(name: str) -> _Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    # without what cannot be had: tools ask for the value of every name, `help` among them
    has_hf = _find_spec("transformers") is not None
    lazy = {name for name, room in _LAZY.items() if has_hf or not room.startswith("resroute.hf.")}
    return sorted({*globals(), *lazy})
