"""The dispatcher takes the fastest backend that can serve, says so, never falls back silently."""

import errno
import logging
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils import cpp_extension

import resroute as rr
from resroute import ops
from resroute.ops import dispatch, native
from resroute.testing import random_stack, randomise

CPU = torch.device("cpu")


def choice(device="cpu", dtype=torch.float32, dim=8, num_bases=3):
    return ops.choose(torch.device(device), dtype, dim, num_bases)


@pytest.fixture(autouse=True)
def automatic():
    with ops.backend("auto"):
        yield


@pytest.fixture
def compiler(monkeypatch):
    """And kernels that are loaded."""
    monkeypatch.setattr(dispatch, "native_available", lambda: True)
    monkeypatch.setattr(dispatch, "_LOADED", {**dispatch._LOADED, "native": None})


@pytest.fixture
def unloaded(monkeypatch):
    """The state of a process that has not asked for the native backend yet."""
    monkeypatch.setattr(dispatch, "native_available", lambda: True)
    monkeypatch.setattr(dispatch, "_LOADED", {"lean": dispatch._LOADED["lean"]})
    monkeypatch.setattr(dispatch, "_FAILED", {})
    monkeypatch.setattr(dispatch, "_SAID", set())


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(dispatch, "native_available", lambda: False)
    monkeypatch.setattr(dispatch, "_SAID", set())


@pytest.mark.usefixtures("compiler")
def test_automatic_choices():
    assert choice() == ("native", "device cpu")
    assert choice(dtype=torch.bfloat16).backend == "native"
    assert choice(dtype=torch.float64) == (
        "lean",
        "it computes float32 and bfloat16, got float64",
    )
    assert choice(num_bases=4).backend == "lean"
    assert choice("meta") == ("lean", "device meta")
    assert str(choice()) == "native (device cpu)"


@pytest.mark.usefixtures("compiler")
def test_details_of_more_than_two_bases_go_to_lean():
    policy = rr.WAV(num_blocks=2, bases=("phase", "split", "random")).build(8, 16)
    assert policy.start(torch.zeros(2, 16)).backend == "lean"
    two = rr.WAV(num_blocks=2).build(8, 16)._phases.num_streams
    assert choice(num_bases=two) == ("native", "device cpu")
    three = policy._phases.num_streams
    assert choice(num_bases=three) == ("lean", "it takes 3 sources of a running block, got 4")


@pytest.mark.usefixtures("compiler")
def test_a_device_may_be_a_name(monkeypatch):
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: object())
    assert ops.choose("cpu", torch.float32, 64) == ("native", "device cpu")
    assert ops.choose("cuda:1", torch.float32, 64) == ("triton", "device cuda")
    with pytest.raises(rr.UserError, match=r"unknown device 'tpu9'; use cpu, cuda, cuda:1 or mps"):
        ops.choose("tpu9", torch.float32, 64)


def test_on_a_gpu_triton_serves_what_it_can(monkeypatch):
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: object())
    assert choice("cuda") == ("triton", "device cuda")
    assert choice("cuda", torch.float16).backend == "triton"
    assert choice("cuda", dim=8193) == ("lean", "it takes widths up to 8192, got 8193")
    assert choice("cuda", torch.float64).backend == "lean"
    assert choice("cuda", num_bases=4).backend == "lean"


@pytest.mark.usefixtures("no_compiler")
def test_a_missing_compiler_is_said_once(caplog):
    with caplog.at_level(logging.WARNING, logger="resroute"):
        assert choice().backend == "lean"
        assert choice().backend == "lean"
    assert [record.message for record in caplog.records] == [
        "no C++ compiler (with ninja) was found: depth routing runs in plain torch"
    ]


@pytest.mark.usefixtures("no_compiler")
def test_what_is_forced_and_cannot_serve_is_refused():
    policy = rr.WAV(num_blocks=2).build(4, 8)
    with (
        ops.backend("native"),
        pytest.raises(rr.UserError, match=r"no C\+\+ compiler .* use 'auto'"),
    ):
        policy.start(torch.zeros(2, 8))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("name", "dtype", "bases", "words"),
    [
        ("native", torch.float64, ("phase",), "it computes float32 and bfloat16, got float64"),
        ("native", torch.float32, ("phase", "random", "duplicate"), "3 sources of a running"),
        ("triton", torch.float32, ("phase",), "it runs on CUDA GPUs, got device cpu"),
    ],
)
def test_a_forced_backend_names_what_it_cannot_do(monkeypatch, name, dtype, bases, words):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    policy = rr.WAV(num_blocks=2, bases=bases).build(4, 8)
    with ops.backend(name), pytest.raises(ValueError, match=words):
        policy.start(torch.zeros(2, 8, dtype=dtype))


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("is_built", [False, True])
def test_a_build_that_is_needed_is_announced(monkeypatch, caplog, is_built):
    said_before = []
    monkeypatch.setattr(native, "is_built", lambda: is_built)
    monkeypatch.setattr(native, "load", lambda: said_before.append(len(caplog.records)))
    with caplog.at_level(logging.WARNING, logger="resroute"):
        assert choice() == ("native", "device cpu")
        assert choice().backend == "native"
        with ops.backend("native"):
            assert choice() == ("native", "asked for")
    words = "compiling the CPU kernels for depth routing, once: about a minute"
    assert [record.message for record in caplog.records] == ([] if is_built else [words])
    assert said_before == [0 if is_built else 1]


@pytest.mark.usefixtures("unloaded")
def test_nothing_is_built_for_what_other_backends_serve(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: pytest.fail("built"))
    assert choice(dtype=torch.float64).backend == "lean"
    assert choice("meta").backend == "lean"
    for name in ("lean", "reference"):
        with ops.backend(name):
            assert choice().backend == name


FAILED_BUILD = """Error building extension 'resroute_native_0': [1/3] c++ -c native_site.cpp
FAILED: native_site.o
c++ -c native_site.cpp
native_site.cpp:4:10: fatal error: torch/library.h: No such file or directory
compilation terminated.
ninja: build stopped: subcommand failed.
"""


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            FAILED_BUILD,
            "native_site.cpp:4:10: fatal error: torch/library.h: No such file or directory",
        ),
        ("[1/2]\nsite.cpp(7): error C2065: 'x'\n", "site.cpp(7): error C2065: 'x'"),
        (
            "the native kernels could not be loaded: no",
            "the native kernels could not be loaded: no",
        ),
        ("", "no reason given"),
    ],
)
def test_a_failed_build_leaves_auto_with_lean(monkeypatch, caplog, words, line):
    tries = []

    def load():
        tries.append(1)
        raise RuntimeError(words)

    monkeypatch.setattr(native, "is_built", lambda: True)
    monkeypatch.setattr(native, "load", load)
    policy, stack = rr.WAV(num_blocks=2).build(4, 8), random_stack(8, 8, dtype=torch.float32)
    why_not = f"the CPU kernels could not be built ({line})"
    with caplog.at_level(logging.WARNING, logger="resroute"):
        assert policy.start(stack.embedding).backend == "lean"
        assert choice() == ("lean", why_not)
    assert [record.message for record in caplog.records] == [
        f"{why_not}: depth routing runs in plain torch"
    ]
    with ops.backend("native"), pytest.raises(rr.UserError) as refusal:
        policy.start(stack.embedding)
    assert str(refusal.value) == (
        f"backend 'native' was asked for, but {why_not}; use 'auto' or 'lean'"
    )
    assert len(tries) == 1
    readout = stack.run(policy)[1]
    with ops.backend("lean"):
        assert torch.equal(stack.run(policy)[1], readout)


needs_compiler = pytest.mark.skipif(not ops.native_available(), reason="no C++ compiler")


@needs_compiler
@pytest.mark.usefixtures("unloaded")
def test_the_compilers_own_words_come_through(monkeypatch, tmp_path, caplog):
    source = tmp_path / "native_site.cpp"
    source.write_text("#error no kernels today\n")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(native, "_SOURCES", (source,))
    monkeypatch.setattr(native, "_load", native._load.__wrapped__)
    with caplog.at_level(logging.WARNING, logger="resroute"):
        assert choice().backend == "lean"
    compiling, failed = [record.message for record in caplog.records]
    assert compiling.startswith("compiling the CPU kernels")
    assert "no kernels today" in failed
    assert "\n" not in failed


@needs_compiler
@pytest.mark.usefixtures("unloaded")
def test_a_cache_that_cannot_be_written_leaves_auto_with_lean(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(native, "_load", native._load.__wrapped__)
    assert not native.is_built()
    assert choice().backend == "lean"


@needs_compiler
def test_kernels_are_built_where_their_library_lies(monkeypatch, tmp_path):
    native.load()
    assert native.is_built()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert not native.is_built()
    name = native._folder().name
    library = tmp_path / name / f"{name}{cpp_extension.LIB_EXT}"
    library.parent.mkdir()
    assert not native.is_built()
    library.touch()
    assert native.is_built()
    # a change of the kernels is another build
    changed = tmp_path / "native_site.cpp"
    changed.write_text("// changed\n")
    monkeypatch.setattr(native, "_SOURCES", (changed, *native._SOURCES[1:]))
    assert not native.is_built()
    monkeypatch.undo()
    monkeypatch.setattr(native, "available", lambda: False)
    assert not native.is_built()


def test_an_unknown_backend_is_refused():
    with pytest.raises(rr.UserError, match=r"unknown backend 'leen' \(did you mean 'lean'\?\)"):
        ops.set_backend("leen")
    with ops.backend("lean"):
        assert choice().backend == "lean"
        with ops.backend("reference"):
            assert choice() == ("reference", "asked for")
        assert choice().backend == "lean"


@pytest.mark.parametrize("backend", ["reference", "lean", "native"])
def test_the_backend_that_was_chosen_is_the_one_that_runs(monkeypatch, backend):
    """Equal results would also come from a silent fall back."""
    if backend == "native" and not ops.native_available():
        pytest.skip("no C++ compiler")
    calls = []
    loaded = {}
    for name in ("lean", "native"):
        if name == "native" and not ops.native_available():
            continue
        operators = ops.operators(name)
        loaded[name] = operators._replace(
            site_forward=lambda *a, n=name, f=operators.site_forward: calls.append(n) or f(*a),
            block_read_forward=lambda *a, n=name, f=operators.block_read_forward: (
                calls.append(n) or f(*a)
            ),
        )
    monkeypatch.setattr(dispatch, "_LOADED", loaded)
    policy = rr.WAV(num_blocks=2).build(4, 8)
    randomise(policy)
    stack = random_stack(8, 8, dtype=torch.float32)
    with ops.backend(backend):
        stack.run(policy)
    # 8 reads, and a block read for each of the two blocks and the readout
    assert calls == ([] if backend == "reference" else [backend] * 11)


HOLDER = """
import sys, time
from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


@needs_compiler
def test_a_build_that_was_killed_does_not_hold_up_the_next(monkeypatch, tmp_path, caplog):
    source = tmp_path / "nothing.cpp"
    source.write_text('extern "C" int nothing() { return 0; }\n')
    monkeypatch.setattr(native, "_SOURCES", (source,))
    folder = tmp_path / "nothing"
    left = folder / "build-x1y2"
    left.mkdir(parents=True)
    # torch waits for ever for the end of a build that has such a file
    for baton in (folder / "lock", left / "lock"):
        baton.touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder / "build.lock")], stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"held\n"
    killer = threading.Timer(0.2, holder.kill)
    killer.start()
    with caplog.at_level(logging.WARNING, logger="resroute"):
        native._load_library(folder)
    assert holder.wait() != 0
    holder.stdout.close()
    library = f"nothing{cpp_extension.LIB_EXT}"
    assert sorted(path.name for path in folder.iterdir()) == ["build.lock", "lock", library]
    assert [record.message for record in caplog.records] == [
        f"waiting for another process that compiles the kernels: {folder}"
    ]
    # what is there is not built again
    monkeypatch.setattr(native, "_build", None)
    native._load_library(folder)


@needs_compiler
def test_without_locks_each_process_builds_for_itself(monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    built = []
    monkeypatch.setattr(native, "_build", built.append)
    native._load_library(tmp_path / "kernels")
    assert built == [tmp_path / "kernels" / f"kernels{cpp_extension.LIB_EXT}"]


@needs_compiler
def test_a_compiler_with_options_is_found(monkeypatch):
    monkeypatch.setenv("CXX", "c++ -m64")
    native.available.cache_clear()
    assert native.available()
    assert "-O3" in native._flags(native._compiler())
    monkeypatch.setenv("CXX", "no-such-compiler")
    native.available.cache_clear()
    assert not native.available()
    native.available.cache_clear()
