"""Loading a converted model from the folder that it was saved to."""

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel

from resroute.config import UserError
from resroute.hf.routed import POLICY
from resroute.hf.routed_model import MARK, method_of, model_class


def from_pretrained(folder: str | Path, **options: Any) -> Any:
    """Load a converted model with its routing.

    Stock classes refuse the folder and say so; this is the way to load it.

    Args:
        folder: Where `save_pretrained` of a converted model, or `Trainer`, wrote it.
        options: As for `from_pretrained` of transformers, such as `dtype`, `attn_implementation`,
            fields of the configuration, or `device_map` with a single device.

    Returns:
        The model; with `output_loading_info`, also what transformers tells of the loading.

    Raises:
        UserError: A folder without a converted model or without weights of its routing, of a class
            that transformers lacks, or a device map of several devices.
    """
    if not isinstance(folder, str | Path) or not (Path(folder) / "config.json").is_file():
        raise UserError(
            f"{folder}: no config.json; name a folder of a converted model's save_pretrained"
        )
    wants_info = options.pop("output_loading_info", False)
    config = options.pop("config", None)
    if config is None:
        config, options = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **options)
    method_of(config, f"{folder}/config.json")
    names = getattr(config, "architectures", None) or ["none"]
    stock = getattr(transformers, names[0], None)
    if not (isinstance(stock, type) and issubclass(stock, PreTrainedModel)):
        raise UserError(
            f"{folder}: made for the class {names[0]}, which transformers does not have"
        )
    if hasattr(config, MARK):
        delattr(config, MARK)
    loaded, info = model_class(stock).from_pretrained(
        folder, config=config, output_loading_info=True, **options
    )
    missing = sorted(name for name in info["missing_keys"] if POLICY in name.split("."))
    if missing:
        raise UserError(f"{folder}: no weights of its routing ({missing[0]}, ..); save it again")
    if len(set(getattr(loaded, "hf_device_map", {}).values())) > 1:
        raise UserError(
            "a converted model cannot be shared among devices, or offloaded; load it with "
            "device_map={'': 'cuda:0'}"
        )
    return (loaded, info) if wants_info else loaded
