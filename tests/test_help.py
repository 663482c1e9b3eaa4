"""What `help` and `dir` tell of the package."""

import dataclasses
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import resroute as rr
from resroute.config import to_dict
from resroute.residual.routed_config import BlockedConfig, RoutedConfig

LAZY = ["convert", "from_pretrained", "importance", "unconvert"]
METHODS = [rr.PreNorm, rr.ReZero, rr.LayerScale, rr.FullAttnRes, rr.BlockAttnRes]
METHODS += [rr.DeltaAttnRes, rr.WAV]
CONFIGS = [*METHODS, RoutedConfig, BlockedConfig, rr.GPTConfig, rr.TrainConfig, rr.StoryConfig]


def shown(thing):
    return pydoc.render_doc(thing, renderer=pydoc.plaintext).replace(" |  ", "")


@pytest.mark.parametrize("config", [*CONFIGS, rr.RunStart], ids=lambda config: config.__name__)
def test_help_describes_every_option(config):
    text = shown(config)
    names = [field.name for field in dataclasses.fields(config)]
    told = [name for name in names if f"\n    {name}: " in text]
    assert told == names
    # the docstring itself comes first
    assert text.index(config.__doc__.splitlines()[0]) < (text + "Attributes:").index("Attributes:")


def test_the_texts_are_those_below_the_fields():
    assert "\n    rho_max: Largest matching factor; None is no limit.\n" in shown(rr.WAV)
    # of a base, in its two lines
    assert (
        "\n    eps: Added to mean squares. Our choice: the papers give none. Zero is for tests: a "
        "source of\n        zeros then gives NaN.\n"
    ) in shown(rr.WAV)
    assert "\n    steps: Optimizer steps.\n" in shown(rr.TrainConfig)
    assert rr.GPTConfig(vocab_size=2).__doc__ == rr.GPTConfig.__doc__


@pytest.mark.parametrize(
    ("method", "papers"),
    [
        (rr.ReZero, ["arXiv 2003.04887"]),
        (rr.LayerScale, ["arXiv 2103.17239, eq. 4"]),
        (rr.FullAttnRes, ["arXiv 2603.15031, eq. 2 to 4"]),
        (rr.BlockAttnRes, ["arXiv 2603.15031, section on Block AttnRes, eq. 5 and 6"]),
        (rr.DeltaAttnRes, ["arXiv 2605.18855"]),
        (rr.WAV, ["arXiv 2606.06564v1", "arXiv 2603.15031, eq. 2 to 4"]),
        (rr.HAARES, ["arXiv 2606.06564v2"]),
    ],
)
def test_methods_name_their_papers_as_the_maths_does(method, papers):
    words = " ".join(method.__doc__.split())
    assert all(paper in words for paper in papers)
    maths = (Path(__file__).parents[1] / "docs" / "methods.md").read_text()
    assert all(paper.split(",")[0] in maths for paper in papers)


RAISING = [config for config in CONFIGS if config not in (rr.PreNorm, rr.ReZero)]
RAISING += [rr.RoutedStack.__init__, rr.health, rr.trajectory, rr.capture, rr.without_sites]
RAISING += [
    rr.without_layer,
    rr.without_sources,
    rr.paper,
    rr.small,
    rr.tiny,
    rr.generate,
    rr.train,
]


@pytest.mark.parametrize("thing", RAISING, ids=lambda thing: thing.__qualname__)
def test_errors_are_documented(thing):
    assert "\nRaises:\n    UserError: " in inspect.getdoc(thing)


@pytest.mark.parametrize("preset", [rr.paper, rr.small, rr.tiny])
def test_presets_say_what_each_argument_is(preset):
    text = inspect.getdoc(preset)
    assert all(f"\n    {name}: " in text for name in inspect.signature(preset).parameters)
    assert "\n    residual: The method; None is `WAV()`.\n" in text
    assert preset(8, vocab_size=5).residual == rr.WAV()


def test_haares_takes_the_options_of_wav_that_its_basis_leaves():
    of_wav = dict(inspect.signature(rr.WAV).parameters)
    del of_wav["bases"], of_wav["basis_seed"]
    assert dict(inspect.signature(rr.HAARES).parameters) == of_wav
    assert rr.HAARES() == rr.WAV(bases=("split",))
    others = {
        "eps": 0.5,
        "key_gain": False,
        "gated": True,
        "num_blocks": 3,
        "learn_bases": True,
        "detail_bias": -1.0,
        "learn_detail_bias": False,
        "bias_running": False,
        "matching": "off",
        "rho_max": None,
        "details_in_readout": True,
    }
    assert to_dict(rr.HAARES(**others)) == to_dict(rr.WAV(bases=("split",), **others))
    assert rr.HAARES(block_layers=2) == rr.WAV(bases=("split",), block_layers=2)
    with pytest.raises(TypeError, match=r"HAARES\(\) got an unexpected keyword argument 'bases'"):
        rr.HAARES(bases=("phase",))


def test_dir_has_what_is_loaded_later_and_the_docstring_names_it():
    assert set(LAZY) | set(rr.__all__) <= set(dir(rr))
    assert all(f"`{name}`" in rr.__doc__ for name in LAZY)
    assert "TYPE_CHECKING" not in dir(rr)
    assert not hasattr(rr, "TYPE_CHECKING")


def test_looking_at_names_loads_nothing():
    code = (
        "import sys, resroute as rr; names = dir(rr); "
        "print('convert' in names, {'transformers', 'resroute.experiments'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True set()\n"


def test_without_transformers_every_name_of_dir_can_be_had(monkeypatch):
    monkeypatch.setattr(rr, "_find_spec", lambda name: None)
    found = dict(inspect.getmembers(rr))
    assert set(found) & set(LAZY) == {"importance"}
    assert found["importance"] is rr.importance


def test_interchange_shows_its_functions_alone():
    assert rr.interchange.__all__ == ["block_size", "from_layout", "to_layout"]
    text = shown(rr.interchange)
    assert "to_layout(policy" in text
    assert "class Tensor" not in text
