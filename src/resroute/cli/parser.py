"""Options of every command: flat, few, each help on one screen."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from resroute import __version__
from resroute.bench import CASES
from resroute.cli import commands
from resroute.cli.bench import bench
from resroute.cli.display import printable
from resroute.cli.export import export
from resroute.cli.inspect import inspect
from resroute.cli.sweep import sweep
from resroute.cli.values import COUNT, LAYERS, SEED, STEPS, name, number, several, whole
from resroute.config import suggestion
from resroute.data import UNKNOWN
from resroute.experiments import SUITES
from resroute.model import PRESETS
from resroute.training.distributed import is_main_process
from resroute.training.track import TRACKERS

_DESCRIPTION = "Residual routing: train and compare how deep Transformers carry information."


class Parser(argparse.ArgumentParser):
    """Says what is wrong in two lines instead of printing its usage."""

    def __init__(self, **options: Any) -> None:
        # the help itself needs no line in the help
        super().__init__(**options, add_help=False)
        self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
        self.allow_abbrev = False
        self.formatter_class = _formatter

    def format_help(self) -> str:
        """The help, with the short usage."""
        usage = self.usage
        self.usage = f"%(prog)s [OPTIONS]{self._operands()}"
        try:
            return super().format_help()
        finally:
            self.usage = usage

    def _operands(self) -> str:
        names = [a.metavar or a.dest for a in self._actions if not a.option_strings]
        return "".join(f" {name}" for name in names)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"unknown {value!r}{suggestion(str(value), known)}; use {', '.join(known)}"
            )

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and two plain lines, said by one of several processes."""
        line = printable(message).replace("\n", "\\n")
        if is_main_process():
            print(f"{self.prog}: {line}\nsee `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(2)

    @property
    def flags(self) -> list[str]:
        """Long options that this command knows."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]


def _formatter(prog: str) -> argparse.HelpFormatter:
    formatter = argparse.HelpFormatter(prog, max_help_position=22, width=80)
    # argparse does not count the indent of a subcommand, which would get a line of its own
    formatter._action_max_length = len("  describe") + 2
    return formatter


def parse(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse, suggesting the option that a misspelt one may have meant."""
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        command: Parser = getattr(options, "parser", parser)
        first = unknown[0]
        word = first.split("=")[0]
        close = suggestion(word, command.flags) if word.startswith("-") else ""
        command.error(f"unknown {'option' if word.startswith('-') else 'word'} {first}{close}")
    return options


def make_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog="resroute", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"resroute {__version__}")
    commands_ = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    _demo(commands_)
    _data(commands_)
    _train(commands_)
    _sample(commands_)
    _facts(commands_)
    _sweep(commands_)
    _report(commands_)
    _inspect(commands_)
    _bench(commands_)
    _export(commands_)
    return parser


def _command(group: Any, word: str, run: Any, summary: str) -> Parser:
    parser: Parser = group.add_parser(word, help=summary, description=summary)
    parser.set_defaults(run=run, parser=parser, hint="")
    return parser


def _demo(group: Any) -> None:
    parser = _command(
        group, "demo", commands.demo, "Train PreNorm, Block AttnRes and WAV on equal data; compare."
    )
    add = parser.add_argument
    parser.set_defaults(hint="; the same command goes on")
    _data_option(parser)
    # two of the models have four blocks
    layers = whole(4, 10_000)
    add("--layers", type=layers, default=24, metavar="L", help="layers of each (24, at least 4)")
    add("--steps", type=STEPS, default=300, metavar="N", help="training steps of each (300)")
    add("--seed", type=SEED, default=0, metavar="S", help="of weights and batches (0)")
    add("--out", type=name, metavar="DIR", help="folder of runs and report (runs/demo)")
    add("--fresh", action="store_true", help="train again; old runs are kept aside")
    _clean(parser)


def _data(group: Any) -> None:
    parser = _command(group, "data", None, "Prepare text for training.")
    inner = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    prepare = _command(
        inner, "prepare", commands.prepare, "Turn text, or generated stories, into a corpus folder."
    )
    add = prepare.add_argument
    add("source", type=name, help="text file, packed or not; text8, tinystories, storyworld")
    add("--out", type=name, metavar="DIR", help="corpus folder to make (data/<name>)")
    add("--from", dest="from_", type=name, metavar="PATH", help="text8, tinystories: files here")
    add("--tokens", type=name, metavar="WHAT", help="characters; BPE size; tokenizer.json; corpus")
    add("--unknown", choices=UNKNOWN, metavar="HOW", help="characters: error, skip or byte (error)")
    _clean(prepare)
    add("--repair", action="store_true", help="mend wrongly decoded text by ftfy")
    add("--wikipedia", action="store_true", help="an XML dump: keep a to z, as text8 does")
    add(
        "--separator", choices=["auto", "endoftext", "blank-line", "none"],
        metavar="KIND", help="of documents: auto, endoftext, blank-line, none",
    )  # fmt: skip
    add("--processes", type=whole(1, 4096), metavar="N", help="for large files (one a core)")
    _story(prepare)
    add("--seed", type=SEED, metavar="S", help="of storyworld (0)")
    size = whole(1, 10**12)
    add("--characters", type=size, metavar="N", help="of storyworld (2000000)")
    described = _command(
        inner, "describe", commands.describe, "Print what is in a text file or a corpus folder."
    )
    add = described.add_argument
    add("path", type=name, metavar="PATH", help="text file, packed or not, or corpus folder")
    add(
        "--order", type=whole(0, 6), default=6, metavar="N",
        help="n-grams to beat, of a corpus, up to this order; 0 for none (6)",
    )  # fmt: skip


def _story(parser: Parser) -> None:
    add = parser.add_argument
    add("--length", type=whole(0, 100), metavar="N", help="scenes in the middle of stories (0)")
    add("--entities", type=whole(0, 12), metavar="N", help="owners with facts of their own (0)")
    add("--distance", type=whole(0, 20_000), metavar="N", help="characters from telling to use (0)")
    add("--held-out", type=number, metavar="P", help="share of combinations kept for test (0)")


def _facts(group: Any) -> None:
    parser = _command(
        group, "facts", commands.facts, "Score whether a model gets the facts of stories right."
    )
    add = parser.add_argument
    add("run_folder", type=name, metavar="RUN", help="run folder, or a checkpoint in it")
    add("--stories", type=COUNT, default=200, metavar="N", help="fresh stories to ask (200)")
    _story(parser)
    add("--seed", type=SEED, default=0, metavar="S", help="of the stories (0)")
    add("--best", action="store_true", help="weights of least validation loss, not the newest")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1 or mps")


def _train(group: Any) -> None:
    parser = _command(group, "train", commands.train, "Train one model and write its run folder.")
    # its options are as many as a screen has lines
    parser._optionals.title = None
    parser.set_defaults(hint="; --resume goes on")
    add = parser.add_argument
    _data_option(parser)
    add("--method", default="wav", metavar="NAME", help=", ".join(commands.METHODS))
    add("--blocks", type=LAYERS, metavar="N", help="depth blocks, where the method has them")
    add("--preset", default="tiny", choices=PRESETS, metavar="NAME", help="width: %(choices)s")
    add("--layers", type=LAYERS, default=24, metavar="L", help="layers (24)")
    add("--context", type=COUNT, default=256, metavar="T", help="tokens of a window (256)")
    add("--steps", type=STEPS, default=1000, metavar="N", help="optimizer steps (1000)")
    add("--batch", type=COUNT, default=8, metavar="B", help="windows a step (8)")
    add("--lr", type=number, default=1e-3, metavar="R", help="peak learning rate (0.001)")
    add("--seed", type=SEED, default=0, metavar="S", help="of weights and batches (0)")
    add(
        "--precision", default="auto", choices=["auto", "float32", "bfloat16"],
        metavar="P", help="auto, float32 or bfloat16",
    )  # fmt: skip
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1 or mps")
    add("--out", type=name, metavar="DIR", help="run folder (runs/train/<method>-L<layers>-..)")
    add("--resume", action="store_true", help="go on with an unfinished run")
    add("--fresh", action="store_true", help="start over; the old run is kept aside")
    add("--deterministic", action="store_true", help="equal bits, or an error")
    add(
        "--track", action="append", default=[], choices=TRACKERS,
        metavar="NAME", help="also report to: %(choices)s",
    )  # fmt: skip
    add(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="other fields: residual.rho_max=1, model.dim=96, compile=true",
    )  # fmt: skip
    _clean(parser)


def _sample(group: Any) -> None:
    parser = _command(group, "sample", commands.sample, "Write text with a trained model.")
    add = parser.add_argument
    add("run_folder", type=name, metavar="RUN", help="run folder or checkpoint folder")
    add("--prompt", default="", metavar="TEXT", help="text to continue (start of a document)")
    add("--tokens", type=STEPS, default=300, metavar="N", help="most tokens to add (300)")
    add("--count", type=COUNT, default=1, metavar="N", help="texts to write (1)")
    add("--temperature", type=number, default=0.8, metavar="X", help="0 is greedy (0.8)")
    add("--top-k", type=COUNT, metavar="K", help="draw among the K likeliest tokens")
    add("--top-p", type=number, metavar="P", help="draw among those that reach probability P")
    add("--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable")
    add("--seed", type=SEED, default=0, metavar="S", help="of the draws (0)")
    add("--best", action="store_true", help="weights of least validation loss, not the newest")
    add("--ema", action="store_true", help="averaged weights, of a run with ema_decay")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1 or mps")


def _sweep(group: Any) -> None:
    parser = _command(group, "sweep", sweep, "Train every cell of a suite; go on after a stop.")
    # its options are more than a screen has lines
    parser._optionals.title = None
    parser.epilog = "of train: --preset --context --steps --batch --lr --precision --device --set"
    add = parser.add_argument
    add("suite", choices=SUITES, metavar="SUITE", help=", ".join(SUITES))
    add("--data", type=several(name), default=["storyworld"], metavar="A,B", help="corpora")
    add("--methods", type=several(name), default=[], metavar="A,B", help="(the suite's)")
    add("--layers", type=several(LAYERS), default=[12, 24, 48], metavar="A,B", help="(12,24,48)")
    add("--seeds", type=COUNT, default=3, metavar="N", help="of each cell (3)")
    add("--primary-seeds", type=COUNT, metavar="N", help="of the primary contrast (5)")
    add("--blocks", type=LAYERS, default=4, metavar="N", help="depth blocks (4)")
    add("--axis", type=several(number), default=[], metavar="A,B", help="rates, widths or times")
    add("--rates", type=name, metavar="DIR", help="a finished sweep of learning rates to go by")
    add("--preset", default="tiny", choices=PRESETS, help=argparse.SUPPRESS)
    add("--context", type=COUNT, default=256, help=argparse.SUPPRESS)
    add("--steps", type=COUNT, default=1000, help=argparse.SUPPRESS)
    add("--batch", type=COUNT, default=8, help=argparse.SUPPRESS)
    add("--lr", type=number, default=3e-3, help=argparse.SUPPRESS)
    add(
        "--precision", default="auto", choices=["auto", "float32", "bfloat16"],
        help=argparse.SUPPRESS,
    )  # fmt: skip
    add("--device", default="auto", help=argparse.SUPPRESS)
    add("--set", action="append", default=[], help=argparse.SUPPRESS)
    add("--out", type=name, metavar="DIR", help="folder of the runs (runs/<suite>)")
    add("--results", type=name, metavar="DIR", help="also add finished cells to this folder")
    add("--reuse", type=name, metavar="DIR", help="results that may have some cells already")
    add(
        "--engine", default="local", choices=["local", "ray"], metavar="E",
        help="local, or ray: a cell takes --cpus N (1), --gpus X (0)",
    )  # fmt: skip
    add("--jobs", type=COUNT, metavar="N", help="local: cells at a time (one a core or GPU)")
    add("--cpus", type=COUNT, help=argparse.SUPPRESS)
    add("--gpus", type=number, help=argparse.SUPPRESS)
    add("--hours", type=number, metavar="H", help="start no cell that would not end in time")
    add("--dry-run", action="store_true", help="print the plan and how long it may take")


def _report(group: Any) -> None:
    parser = _command(
        group, "report", commands.report, "Compare the finished runs in and below a folder."
    )
    add = parser.add_argument
    add("folder", type=name, metavar="DIR", help="where the runs are, such as runs/demo")
    add("--out", type=name, metavar="DIR", help="where to write the page and figures (DIR itself)")
    add("--title", metavar="TEXT", help="heading of the page")


def _inspect(group: Any) -> None:
    parser = _command(group, "inspect", inspect, "Show what the router of a trained model learned.")
    add = parser.add_argument
    add("run_folder", type=name, metavar="RUN", help="run folder, or a checkpoint in it")
    add("--against", type=name, metavar="RUN", help="another one to show beside it")
    add("--data", type=name, metavar="WHAT", help="corpus or text file to look at (the run's own)")
    add("--windows", type=COUNT, metavar="N", help="of text (as many as have 4,096 tokens)")
    add(
        "--without", type=several(name), metavar="A,B",
        help="leave out each layer, block, site, source, or none",
    )  # fmt: skip
    add("--prompt", metavar="TEXT", help="text to show token by token (of the first window)")
    add("--best", action="store_true", help="weights of least validation loss, not the newest")
    add("--ema", action="store_true", help="averaged weights, of a run with ema_decay")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1 or mps")
    add("--out", type=name, metavar="DIR", help="where to write the page (RUN/inspect)")
    add("--title", metavar="TEXT", help="heading of the page")


def _bench(group: Any) -> None:
    parser = _command(group, "bench", bench, "Time methods and backends in pairs; checked first.")
    add = parser.add_argument
    # what is not given is the case's own
    add("case", choices=CASES, metavar="CASE", help=", ".join(CASES))
    add("--methods", type=name, metavar="A,B", help="against PreNorm (block-attn-res,wav)")
    add("--backends", type=name, metavar="X,Y", help="reference, lean, native, triton (auto)")
    add("--layers", type=LAYERS, metavar="L", help="layers (48)")
    add("--dim", type=COUNT, metavar="D", help="width (256)")
    add("--batch", type=COUNT, metavar="B", help="windows a step (8), rows to decode (1 and 32)")
    add("--context", type=COUNT, metavar="T", help="tokens of a window (256)")
    add("--blocks", type=LAYERS, metavar="N", help="depth blocks, where a method has them (4)")
    add("--pairs", type=whole(1, 10_000), metavar="N", help="measurements A B A B (30)")
    add(
        "--precision", choices=["auto", "float32", "bfloat16"],
        metavar="P", help="auto, float32 or bfloat16 (auto)",
    )  # fmt: skip
    add("--compile", action=argparse.BooleanOptionalAction, help="compile sublayers of a step")
    add("--threads", type=whole(1, 4096), metavar="N", help="CPU threads (torch's number)")
    add("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1 or mps (auto)")
    add("--out", type=name, metavar="FILE", help="JSON file to write: settings and every pair")


def _export(group: Any) -> None:
    parser = _command(
        group, "export", export, "Write a trained model as Hugging Face transformers loads it."
    )
    add = parser.add_argument
    add("run_folder", type=name, metavar="RUN", help="run folder, or a checkpoint in it")
    add("--to", type=name, required=True, metavar="DIR", help="new folder to write")
    add("--best", action="store_true", help="weights of least validation loss, not the newest")
    add("--ema", action="store_true", help="averaged weights, of a run with ema_decay")
    add("--no-remote-code", action="store_true", help="weights alone: loading needs resroute")


def _data_option(parser: Parser) -> None:
    parser.add_argument(
        "--data", type=name, default="storyworld",
        metavar="WHAT", help="text file, corpus or storyworld",
    )  # fmt: skip


def _clean(parser: Parser) -> None:
    parser.add_argument(
        "--clean", action="store_true", help="drop BOM and NUL, turn CRLF and CR into LF"
    )
