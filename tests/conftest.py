import contextlib
import gc
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

with pytest.MonkeyPatch.context() as environment, contextlib.suppress(ImportError):
    # triton reads it as it is imported, which torch may do before the kernels' tests can
    if not torch.cuda.is_available():
        environment.setenv("TRITON_INTERPRET", "1")
        import triton  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """In tests as small as these a second thread has nothing to do but wait."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


@pytest.fixture(scope="module", autouse=True)
def settled_heap():
    """Put what is there by now out of the garbage collector's sight.

    Each run and each measurement of memory collects; with all modules and tests in sight that took
    most of their time.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    # what is left must be taken down in order
    gc.unfreeze()


@pytest.fixture
def real_data() -> Path:
    """Folder of real text files, named by RESROUTE_DATA."""
    if not (folder := os.environ.get("RESROUTE_DATA")):
        pytest.skip("RESROUTE_DATA is not set to a folder of real text files")
    return Path(folder)


@pytest.fixture(scope="session")
def cheap_corpus(tmp_path_factory):
    """A storyworld corpus of a few dozen stories."""
    from resroute.data import prepare_storyworld

    return prepare_storyworld(tmp_path_factory.mktemp("data") / "tales", characters=30_000)


def pytest_addoption(parser):
    parser.addoption(
        "--backend", default="auto", help="ops backend of tests that do not name one themselves"
    )


@pytest.fixture(autouse=True)
def backend(request):
    """Run each test on the backend that was asked for, and leave the choice as it was."""
    from resroute import ops

    with ops.backend(request.config.getoption("--backend")):
        yield


class Workers:
    """A process that has torch imported and runs each job in forked children (`workers.py`)."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("workers.py")), str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, action, size=1, *, kill_after=None, kill_when=None, stagger=0.0, timeout=240.0,
        **arguments,
    ):  # fmt: skip
        """Answers of a job's processes; they are killed as `workers.py` says."""
        from resroute.config import to_dict

        if "config" in arguments:
            arguments["config"] = to_dict(arguments["config"])
        job = {"action": action, "size": size, "arguments": arguments}
        job |= {"kill_after": kill_after, "kill_when": kill_when, "stagger": stagger}
        job["timeout"] = timeout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def values(self, *job, **options):
        """As `run`, where every process must succeed."""
        answers = self.run(*job, **options)
        assert all("value" in answer for answer in answers), answers
        return [answer["value"] for answer in answers]


@pytest.fixture(scope="session")
def workers(tmp_path_factory):
    """For tests with several processes, or processes that are killed."""
    server = Workers(tmp_path_factory.mktemp("workers"))
    yield server
    server.process.stdin.close()
    server.process.wait(timeout=60)
    server.process.stdout.close()


@pytest.fixture
def make_config(cheap_corpus, tmp_path):
    """Configurations of runs that take a fraction of a second."""
    import resroute as rr

    def make(residual=None, *, out="run", model=None, **options):
        shape = {"num_layers": 2, "dim": 12, "num_heads": 2, "context": 48, **(model or {})}
        config = rr.GPTConfig(
            vocab_size=cheap_corpus.tokenizer.vocab_size,
            residual=residual or rr.WAV(num_blocks=1),
            **shape,
        )
        settings = {
            "steps": 6,
            "batch_size": 4,
            "warmup_steps": 2,
            "learning_rate": 3e-3,
            "evaluate_every": 2,
            "evaluation_windows": 4,
            "log_every": 1,
            "checkpoint_every": 2,
            "precision": "float32",
            "device": "cpu",
            # else each run would measure it
            "peak_flops": 1e11,
            **options,
        }
        return rr.TrainConfig(
            model=config, data=str(cheap_corpus.path), out=str(tmp_path / out), **settings
        )

    return make


@pytest.fixture(scope="session")
def train_words():
    """Makes the command `resroute train`, without its name, of a run as those of `make_config`."""

    def words(corpus, out):
        return (
            f"train --data {corpus} --out {out} --layers 2 --blocks 1 --context 48 --batch 4 "
            "--device cpu --precision float32 --set model.dim=12 --set model.num_heads=2 "
            "--set evaluation_windows=4 --set log_every=1 --set peak_flops=1e11"
        ).split()

    return words


@pytest.fixture
def sign_checkpoint():
    """Makes a checkpoint's checksums fit what is in it now, as a deceiver would."""
    from resroute.training.checkpoint import signature

    def sign(folder):
        state = json.loads((folder / "state.json").read_text())
        for name, about in state["files"].items():
            if len(name) < 200 and (folder / name).is_file() and isinstance(about, dict):
                content = (folder / name).read_bytes()
                about |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        state["sha256"] = signature(state)
        (folder / "state.json").write_text(json.dumps(state))

    return sign


def checkpoints(run):
    """Checkpoint folders of a run, oldest first; what was set aside is none."""
    return sorted(Path(run, "checkpoints").glob("step_??????"))


def lines(run, *kinds):
    """Whole lines of metrics.jsonl, of some kinds or all, without times and memory."""
    file = Path(run, "metrics.jsonl")
    whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    noise = ("tokens_per_second", "model_flop_utilisation", "memory_bytes")
    records = [{k: v for k, v in json.loads(line).items() if k not in noise} for line in whole]
    return [record for record in records if not kinds or record["kind"] in kinds]


def tensors(folder):
    """The bits of all of a checkpoint's, by file and name."""
    from safetensors.torch import load_file

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


@pytest.fixture(scope="session")
def make_ear():
    """Makes listeners that keep the messages of a run, and do something after each step."""
    import resroute as rr

    class Ear(rr.Listener):
        def __init__(self, after=None):
            self.said = []
            self.after = after

        def message(self, text):
            self.said.append(text)

        def advance(self, step):
            if self.after is not None:
                self.after(step)

    return Ear
