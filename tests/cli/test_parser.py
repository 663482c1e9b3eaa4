import re
from typing import Any

import pytest

COMMANDS = [
    *([], ["demo"], ["data"], ["data", "prepare"]),
    *(["data", "describe"], ["train"], ["sample"], ["sweep"], ["report"], ["inspect"]),
    *(["facts"], ["export"], ["bench"]),
]
SEED_ENDS = ["-1", str(2**63), "1.5", "nan", "", "9" * 5000]
WHOLE = [
    *[("train", "--layers", text) for text in ("0", "-1", "10001", "1e3", "nan", "", "\u00bd")],
    *[("train", "--blocks", text) for text in ("0", "-2", "10001", "x")],
    *[("train", "--context", text) for text in ("0", "-1", "1000001", "9" * 30)],
    *[("train", "--steps", text) for text in ("-1", "1000000001", "ten")],
    *[("train", "--batch", text) for text in ("0", "-8", "9" * 30)],
    *[("train", "--seed", text) for text in SEED_ENDS],
    *[("demo", "--seed", text) for text in SEED_ENDS],
    *[("demo", "--layers", text) for text in ("0", "3", "99999999")],
    *[("demo", "--steps", text) for text in ("-1", "1.0")],
    *[("data prepare storyworld", "--seed", text) for text in SEED_ENDS],
    *[("data prepare storyworld", "--characters", text) for text in ("0", "-1", "9" * 20)],
    *[("sample runs/base", "--seed", text) for text in SEED_ENDS],
    *[("sample runs/base", "--tokens", text) for text in ("-1", "nan", "9" * 30)],
    *[("sample runs/base", "--count", text) for text in ("0", "-1", "9" * 30)],
    *[("sample runs/base", "--top-k", text) for text in ("0", "-1", "9" * 30)],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_a_screen(run: Any, command: list[str]) -> None:
    outcome = run(*command, "--help")
    lines = outcome.out.splitlines()
    assert outcome.code == 0
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(" ".join(["usage: resroute", *command]))


def test_every_command_is_looked_at(run: Any) -> None:
    groups = ([], ["data"])
    found = [
        [*group, line.split()[0]]
        for group in groups
        for line in run(*group, "--help").out.splitlines()
        if re.match(r" {4}[a-z]\S* +[A-Z]", line)
    ]
    assert sorted(found) == sorted(command for command in COMMANDS if command)


def test_a_command_stands_on_one_line_with_its_help(run: Any) -> None:
    lines = run("data", "--help").out.splitlines()[-2:]
    assert [line.split(maxsplit=1) for line in lines] == [
        ["prepare", "Turn text, or generated stories, into a corpus folder."],
        ["describe", "Print what is in a text file or a corpus folder."],
    ]


def test_version(run: Any) -> None:
    assert run("--version").out == "resroute 0.1.0\n"


@pytest.mark.parametrize(("command", "option", "text"), WHOLE)
def test_whole_numbers_are_bounded(refused: Any, command: str, option: str, text: str) -> None:
    error = refused(*command.split(), f"{option}={text}", says=(option, "needs a whole number"))
    assert len(error) < 250


@pytest.mark.parametrize("option", ["--temperature", "--top-p"])
@pytest.mark.parametrize("text", ["", "x", "1,5", "0x1"])
def test_numbers(refused: Any, option: str, text: str) -> None:
    refused("sample", "runs/base", f"{option}={text}", says=(option, "needs a number", text))


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--data", ""],
        ["train", "--out", " "],
        ["demo", "--data="],
        ["demo", "--out="],
        ["data", "prepare", ""],
        ["data", "prepare", "storyworld", "--out="],
        ["sample", ""],
        ["report", ""],
        ["report", "runs", "--out="],
    ],
)
def test_empty_names_do_not_mean_the_current_folder(refused: Any, arguments: list[str]) -> None:
    refused(*arguments, says="needs a name, got an empty one")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required: COMMAND"),
        ([""], "unknown ''; use demo, data, train, sample, facts, sweep, report, inspect, bench, "),
        (["trian"], "unknown 'trian' (did you mean 'train'?)"),
        (["data"], "required: COMMAND"),
        (["data", "prep"], "did you mean 'prepare'?"),
        (["data", "prepare"], "required: source"),
        (["train", "--lauers", "3"], "unknown option --lauers (did you mean '--layers'?)"),
        (["train", "--lay", "3"], "unknown option --lay (did you mean '--layers'?)"),
        (["train", "--layers"], "--layers: expected one argument"),
        (["train", "--resume=1"], "--resume: ignored explicit argument '1'"),
        (["train", "wav"], "unknown word wav"),
        (["train", "--preset", "huge"], "unknown 'huge'; use paper, small, tiny"),
        (["train", "--precision", "float16"], "use auto, float32, bfloat16"),
        (["sample"], "required: RUN"),
        (["sample", "runs/base", "--promt", "x"], "did you mean '--prompt'?"),
        (["sample", "runs/base", "--prompt", "-x"], "--prompt: expected one argument"),
        (["report", "runs", "again"], "unknown word again"),
        (["data", "prepare", "storyworld", "--separator", "no"], "unknown 'no'"),
        (["train", "a\nb\x1b[2J"], "unknown word a\\nb\\x1b[2J"),
    ],
)
def test_misspelt_words_and_options(refused: Any, arguments: list[str], says: str) -> None:
    error = refused(*arguments, says=says)
    assert error.splitlines()[1].endswith("--help`")


def test_the_last_of_an_option_counts_and_bounds_are_inside(run: Any, place: Any) -> None:
    outcome = run("sample", "runs/base", "--tokens", "9", "--tokens", "0", "--seed", str(2**63 - 1))
    assert (outcome.code, outcome.out, outcome.err) == (0, "\n", "")
