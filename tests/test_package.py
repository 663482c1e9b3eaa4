"""What importing and installing the package does and does not do."""

import subprocess
import sys
from importlib import resources

import resroute as rr

OPTIONAL = ("matplotlib", "rich", "transformers", "datasets", "tokenizers", "ray", "triton")


def test_importing_needs_torch_and_nothing_optional():
    code = (
        "import sys, resroute; "
        f"print([name for name in {OPTIONAL!r} if name in sys.modules]); "
        "print(sorted({n.split('.')[1] for n in sys.modules if n.startswith('resroute.')}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    optional, rooms = done.stdout.splitlines()
    assert optional == "[]"
    assert rooms == str(["config", "core", "data", "files", "model", "ops", "residual", "training"])


def test_the_public_names_are_there():
    assert all(hasattr(rr, name) for name in rr.__all__)
    assert rr.__version__ == "0.1.0"
    assert resources.files("resroute").joinpath("py.typed").is_file()


def test_a_user_error_is_a_value_error():
    assert issubclass(rr.UserError, ValueError)


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "resroute", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "resroute 0.1.0\n"
