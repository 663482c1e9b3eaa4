"""Models of Hugging Face transformers: resroute's GPT as one of them.

Importing this room makes `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` know the type
`resroute`. Whatever is saved of such a model has its code beside it, so that it also loads where
resroute is not installed.
"""

from resroute.config import UserError

try:
    import transformers as transformers
except ImportError as error:
    if not (error.name or "").startswith("transformers"):
        raise
    raise UserError(
        "Hugging Face models need the package transformers: pip install 'resroute[hf]'"
    ) from None

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from resroute.hf.configuration_resroute import ResrouteConfig as ResrouteConfig
from resroute.hf.gpt import from_gpt as from_gpt
from resroute.hf.gpt import to_gpt as to_gpt
from resroute.hf.modeling_resroute import ResrouteForCausalLM as ResrouteForCausalLM
from resroute.hf.modeling_resroute import ResrouteModel as ResrouteModel

AutoConfig.register("resroute", ResrouteConfig)
AutoModel.register(ResrouteConfig, ResrouteModel)
AutoModelForCausalLM.register(ResrouteConfig, ResrouteForCausalLM)

ResrouteConfig.register_for_auto_class()  # type: ignore[no-untyped-call]
ResrouteModel.register_for_auto_class("AutoModel")  # type: ignore[no-untyped-call]
ResrouteForCausalLM.register_for_auto_class(  # type: ignore[no-untyped-call]
    "AutoModelForCausalLM"
)
