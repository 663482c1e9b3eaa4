"""Looking inside a trained model: what its router learned, as values and as a page."""

from resroute.experiments.inspect.inspection import Inspection as Inspection
from resroute.experiments.inspect.inspection import inspect_model as inspect_model
from resroute.experiments.inspect.page import run_labels as run_labels
from resroute.experiments.inspect.page import setup_line as setup_line
from resroute.experiments.inspect.prompt import shown_ids as shown_ids
from resroute.experiments.inspect.run import inspect_run as inspect_run
from resroute.experiments.inspect.summary import summary as summary
from resroute.experiments.inspect.write import save_inspection as save_inspection
from resroute.experiments.inspect.write import writable as writable

__all__ = [
    "Inspection",
    "inspect_model",
    "inspect_run",
    "run_labels",
    "save_inspection",
    "setup_line",
    "shown_ids",
    "summary",
    "writable",
]
