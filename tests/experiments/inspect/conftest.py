"""Runs that were trained for a dozen steps, looked at once a session."""

import json
import re

import pytest
import torch

import resroute as rr
from resroute.experiments.inspect import inspect_run
from resroute.experiments.inspect.inspection import Inspection
from resroute.experiments.inspect.page import HEADINGS, render_page
from resroute.experiments.inspect.prompt import SiteReads, TokenReads
from resroute.residual.base import by_kind
from resroute.testing import randomise

DRAWING = b'<svg viewBox="0 0 9 9"><path d="M0 0"/></svg>'
METHODS = {
    "wav": rr.WAV(num_blocks=2),
    "block": rr.BlockAttnRes(num_blocks=2),
    "pre": rr.PreNorm(),
}
CONTEXT = 32


@pytest.fixture(scope="session")
def trained(cheap_corpus, tmp_path_factory):
    """A folder of finished runs by the names in `METHODS`, with three checkpoints each."""
    folder = tmp_path_factory.mktemp("inspect")
    for name, residual in METHODS.items():
        model = rr.GPTConfig(
            vocab_size=cheap_corpus.tokenizer.vocab_size, context=CONTEXT, num_layers=4,
            num_heads=2, dim=32, residual=residual,
        )  # fmt: skip
        rr.train(
            rr.TrainConfig(
                model=model, data=str(cheap_corpus.path), out=str(folder / name), steps=12,
                batch_size=4, warmup_steps=2, learning_rate=3e-3, evaluate_every=4,
                evaluation_windows=4, log_every=2, observe_every=4, checkpoint_every=4, keep=3,
                ema_decay=0.5, precision="float32", device="cpu", peak_flops=1e11,
            )
        )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def looked(trained):
    """Those runs by their names, looked at on the four windows that they were evaluated on."""
    return {name: inspect_run(trained / name, windows=4) for name in METHODS}


def site(place, name, weights, **fields):
    """What a capture tells of a site, whose kind is the second word of its name."""
    layer, _, kind = name.partition(" ")
    found = {
        "site": place, "name": name, "layer": int(layer) if kind else None, "kind": kind or None,
        "weights": weights, "kinds": by_kind(weights), "entropy": None, "effective_sources": None,
        "read_rms": None, "update_rms": None, "cosine": {}, "update_gradient": None,
        "read_gradient": None, "gate": None, "coefficient": None, "classes": {},
    }  # fmt: skip
    assert fields.keys() <= found.keys()
    return {**found, **fields}


SITES = (
    site(0, "0 attention", {"embedding": 1.0}, read_rms=2.0, update_rms=1.0),
    site(1, "0 mlp", {"embedding": 0.25, "running state": 0.75}, read_rms=0.0, update_rms=3.0),
    site(2, "1 attention", {"embedding": 0.5, "state 0": 0.5}, read_rms=4.0),
    site(
        3, "1 mlp", {"embedding": 0.1, "state 0": 0.2, "running state": 0.7},
        update_rms=0.5, cosine={"running state": -0.5},
    ),
    site(4, "readout", {"embedding": 0.2, "state 0": 0.3, "state 1": 0.5}, read_rms=1.0),
)  # fmt: skip


def table_of(sites):
    """Their weights as `Capture.table` gives them, running sources last."""
    names = list(dict.fromkeys(name for one in sites for name in one["weights"]))
    names.sort(key=lambda name: name.startswith("running"))
    return {
        "sites": [one["name"] for one in sites],
        "sources": names,
        "weights": [[one["weights"].get(name) for name in names] for one in sites],
    }


def bases_of_blocks(*blocks):
    """`Trajectory.result` of blocks that are told as shares by set and the best ones."""
    return {
        "bases": ["state", "phase"],
        "blocks": [
            {
                "size": len(best),
                "captured": {name: {"share": share} for name, share in shares.items()},
                "pca": {"cumulative": list(best)},
                "third": {"best": {"share": 0.03}, "signs": None},
            }
            for shares, best in blocks
        ],
    }


BASES = bases_of_blocks(
    ({"state": 0.5, "state + phase": 0.7, "in use": 0.7}, (0.6, 0.8, 0.9, 1.0)),
    ({"state": 0.3, "state + phase": 0.9, "in use": 0.9}, (0.4, 0.95, 0.98, 1.0)),
)


PROMPT = TokenReads(
    tokens=("a", "</script>", "<!--", ""),
    losses=(None, 1.23456789, float("nan"), 2.0),
    sites=(
        SiteReads(
            name="0 mlp", sources=("embedding", "running state"), depths=(0.0, 0.5),
            weights=((0.25, 0.75), (1.0, 0.0), (0.001, 0.999), (0.5, 0.5)),
        ),
        SiteReads(
            name="readout", sources=("embedding", "state 0", "state 1"), depths=(0.0, 0.75, 1.75),
            weights=((0.2, 0.3, 0.5),) * 4,
        ),
    ),
)  # fmt: skip


@pytest.fixture(scope="session")
def make_inspection():
    """Makes an inspection by hand: two layers in two blocks, unless fields say otherwise."""

    def make(sites=SITES, **fields):
        table = table_of(sites)
        kinds = list(dict.fromkeys(one["kind"] for one in sites if one["kind"]))
        return Inspection(
            **{
                "name": "a run", "label": "Block AttnRes", "corpus": "tales", "step": 30,
                "seed": 0, "num_layers": 2, "dim": 8, "windows": 2, "tokens": 64, "loss": 2.5,
                "seen": {
                    "sites": list(sites), "layer_kinds": kinds, "num_layers": 2, "details": [],
                    "source_rms": {}, "blocks": [[0, 2], [2, 4]],
                },
                "tables": {"all tokens": table} if table["sources"] else {}, "past": {},
                "records": (), "bases": BASES, "findings": (), "importance": (), "prompt": None,
                **fields,
            }
        )  # fmt: skip

    return make


@pytest.fixture(scope="session")
def rendered():
    """Renders pages with something else in place of their figures."""

    def render(inspections, title="t", names=tuple(HEADINGS)):
        return render_page(inspections, title, dict.fromkeys(names, DRAWING))

    return render


@pytest.fixture(scope="session")
def data_of():
    """What a page's script is given."""
    return lambda text: json.loads(re.search(r'id="data">(.*?)</script>', text)[1])


class Other(torch.nn.Module):
    """A model that is not ours, with logits by name; a layer has a sublayer of each kind."""

    class Output:
        def __init__(self, logits):
            self.logits = logits

    def __init__(self, residual, kinds, *, num_layers=2, dim=6, vocab_size=11):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(vocab_size, dim)
        self.policy = residual.build(num_layers, dim, kinds)
        sites = range(self.policy.num_sites)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(dim, dim) for _ in sites)
        randomise(self.policy)

    def forward(self, tokens):
        stream = self.policy.start(self.embed(tokens))
        for site, part in enumerate(self.parts):
            stream = self.policy.write(stream, site, part(self.policy.read(stream, site)))
        return self.Output(self.policy.finish(stream) @ self.embed.weight.T)
