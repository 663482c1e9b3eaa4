"""The demo: three methods at 24 layers on equal data, from equal weights, for equal steps."""

from collections.abc import Sequence
from pathlib import Path

from resroute.analysis import Run, read_run
from resroute.data import Corpus
from resroute.experiments.report import write_report
from resroute.experiments.sample import sample
from resroute.files import write_text
from resroute.model import tiny
from resroute.residual import WAV, BlockAttnRes, PreNorm, ResidualConfig
from resroute.training import Listener, TrainConfig, load, train

METHODS: tuple[ResidualConfig, ...] = (
    PreNorm(),
    BlockAttnRes(num_blocks=4),
    WAV(num_blocks=4),
)
CONTEXT = 256


def demo_configs(
    corpus: Corpus, out: Path, *, num_layers: int = 24, steps: int = 300, seed: int = 0
) -> list[TrainConfig]:
    """One configuration a method, which differ in the method alone.

    Float32, since at this width bfloat16 autocast is slower on the CPUs that were measured.
    """
    longest_window = min(corpus.split(split).tokens - 1 for split in ("train", "val"))
    configs = []
    for residual in METHODS:
        model = tiny(
            num_layers,
            vocab_size=corpus.tokenizer.vocab_size,
            context=max(1, min(CONTEXT, longest_window)),
            residual=residual,
        )
        config = TrainConfig(
            model=model,
            data=str(corpus.path),
            steps=steps,
            batch_size=4,
            learning_rate=6e-3,
            warmup_steps=min(30, steps),
            seed=seed,
            evaluate_every=max(1, steps // 6),
            log_every=max(1, steps // 40),
            checkpoint_every=max(1, steps // 2),
            precision="float32",
        )
        name = config.run_name(corpus.fingerprint)
        configs.append(_placed(config, out / name))
    return configs


def demo(
    corpus: Corpus,
    out: Path,
    configs: Sequence[TrainConfig],
    *,
    fresh: bool = False,
    listener: Listener | None = None,
) -> tuple[list[Run], list[Path]]:
    """Train each configuration, sample from it, and write the report.

    Finished runs are reused and unfinished ones go on.

    Returns:
        The runs, and the report's files in `out`, the page first.
    """
    listener = listener or Listener()
    runs = []
    for config in configs:
        summary = train(config, resume=not fresh, fresh=fresh, listener=listener)
        path = Path(summary["path"])
        if not (path / "sample.txt").exists():
            model, tokenizer, _ = load(path)
            (text,) = sample(model, tokenizer, max_new_tokens=config.model.context)
            write_text(path / "sample.txt", text + "\n")
        runs.append(read_run(path))
    title = f"resroute demo on {corpus.name}"
    return runs, write_report(runs, out, title=title)


def _placed(config: TrainConfig, path: Path) -> TrainConfig:
    from dataclasses import replace

    return replace(config, out=str(path))
