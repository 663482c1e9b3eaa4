"""The command `export`: a trained model as a folder that transformers loads."""

import argparse

from resroute.cli.signals import cleaning_up


def export(options: argparse.Namespace) -> None:
    """Write the folder and print its name."""
    # transformers takes seconds to import
    from resroute.hf.export import export as write

    with cleaning_up():
        folder = write(
            options.run_folder,
            options.to,
            best=options.best,
            ema=options.ema,
            remote_code=not options.no_remote_code,
        )
    print(folder)
