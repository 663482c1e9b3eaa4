import json
from pathlib import Path

import pytest
from safetensors.torch import load_file


def checkpoints(run):
    """Checkpoint folders of a run, oldest first; what was set aside is none."""
    return sorted(Path(run, "checkpoints").glob("step_??????"))


def lines(run):
    """Lines of metrics.jsonl without times and memory."""
    records = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    noise = ("tokens_per_second", "model_flop_utilisation", "memory_bytes")
    return [{k: v for k, v in record.items() if k not in noise} for record in records]


def tensors(folder):
    """The bits of all of a checkpoint's, by file and name."""
    return {
        f"{path.stem}:{name}": (tensor.dtype, tensor.shape, tensor.numpy().tobytes())
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


class Runs:
    """What run folders hold."""

    checkpoints = staticmethod(checkpoints)
    lines = staticmethod(lines)
    tensors = staticmethod(tensors)

    @staticmethod
    def leftovers(run):
        """Files and folders of unfinished writes."""
        return sorted(str(path.relative_to(run)) for path in Path(run).rglob("*.tmp"))

    @staticmethod
    def assert_same(a, b):
        """Two finished runs end with equal weights, optimizer and average, and report the same."""
        left, right = checkpoints(a)[-1], checkpoints(b)[-1]
        assert left.name == right.name
        expected, found = tensors(left), tensors(right)
        assert expected.keys() == found.keys()
        assert [name for name, bits in expected.items() if bits != found[name]] == []
        assert lines(a) == lines(b)
        summaries = [json.loads(Path(run, "summary.json").read_text()) for run in (a, b)]
        for name in ("validation_loss", "best_validation_loss"):
            assert summaries[0][name] == summaries[1][name]


@pytest.fixture(scope="session")
def runs():
    return Runs
