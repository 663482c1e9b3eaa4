import pytest

from resroute.analysis import find_runs
from resroute.experiments.compare import compare
from resroute.experiments.report.tables import groups_table
from resroute.experiments.report.text import (
    curves_text,
    declared_text,
    gap_text,
    latex,
    markdown,
    primary_lines,
    terminal_table,
    trend_text,
)
from resroute.experiments.study import Contrast
from resroute.residual import WAV, BlockAttnRes

MINUS = "\u2212"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a_b|c\n*d* `e` [f](g) #h", r"a\_b\|c \*d\* \`e\` \[f\](g) \#h"),
        ("<script> & ~x~ \\", r"&lt;script&gt; &amp; \~x\~ " + "\\\\"),
    ],
)
def test_markdown_shows_text_as_it_is(text, shown):
    assert markdown(text) == shown


def test_latex_prints_text_as_it_is():
    assert latex("a_b & 5 % of $x^2$ {c}\\ #d ~ <e>") == (
        r"a\_b \& 5 \% of \$x\textasciicircum{}2\$ \{c\}\textbackslash{} \#d "
        r"\textasciitilde{} \textless{}e\textgreater{}"
    )
    assert latex(f"{MINUS}1") == "$-$1"


def test_the_primary_contrast_in_words(make_run, tmp_path):
    for seed in range(3):
        make_run(f"b{seed}", BlockAttnRes(num_blocks=4), seed=seed, final=0.8)
        make_run(f"w{seed}", WAV(num_blocks=4), seed=seed, final=0.7 + 0.01 * (seed - 1))
        make_run(f"x{seed}", BlockAttnRes(num_blocks=4), seed=seed, final=1.0, corpus="other")
        final = 1.0 + 0.1 * (seed - 1)
        make_run(f"y{seed}", WAV(num_blocks=4), seed=seed, final=final, corpus="other")
    primary = Contrast(treatment="WAV", baseline="Block AttnRes", num_layers=4)
    other, tales = primary_lines(compare(find_runs(tmp_path / "runs"), primary=primary))
    assert tales.startswith(
        "storyworld: WAV better by 0.100 (0.075 .. 0.125), n=3 (nats/char); perplexity "
        f"{MINUS}0.2117 ("
    )
    assert tales.endswith("; p = 0.003 (0.007 corrected)")
    assert declared_text(primary, (), 1) == (
        "WAV minus Block AttnRes at 4 layers was declared as the one primary contrast before the "
        "runs were made."
    )
    assert "were made, with 3 seeds (raised to 8 when results were known). It is tested on 2" in (
        declared_text(primary, (3, 5, 8), 2)
    )
    assert other.startswith(
        f"other: no significant difference (n=3); difference {MINUS}0.0000 ({MINUS}0.2484 .. "
        "+0.2484) nats/char; perplexity "
    ) or other.startswith(
        f"other: no significant difference (n=3); difference +0.0000 ({MINUS}0.2484 .. "
    )


def test_what_is_not_there_is_not_spoken_of(make_run, tmp_path):
    make_run("a")
    make_run("b", BlockAttnRes(num_blocks=4))
    study = compare(find_runs(tmp_path / "runs"))
    assert curves_text(study) == "Validation loss. The first steps are cut off at the top."
    assert trend_text(study) == "Final validation loss."
    assert "interval" not in gap_text(study)
    make_run("a1", seed=1)
    make_run("c", rate=1e-4)
    study = compare(find_runs(tmp_path / "runs"))
    assert "the mean over seeds" in curves_text(study)
    assert "each method at its best learning rate" in curves_text(study)
    assert "dots single runs" in trend_text(study)
    assert "A circle marks" in gap_text(study)


def test_a_terminal_of_80_columns_has_room(study_of_sweep):
    from rich.console import Console

    console = Console(width=80, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(terminal_table(groups_table(study_of_sweep, is_short=True)))
    lines = captured.get().splitlines()
    assert lines[0].split() == [
        "method", "corpus", "layers", "mean", "loss", "n", "deviation", "95", "%", "interval",
    ]  # fmt: skip
    # two lines of heading, a rule, three methods at two depths on two corpora
    assert len(lines) == 3 + 12
