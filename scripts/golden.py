"""Write tests/golden/losses.json anew: ten losses of every method, to 17 digits.

Run by `make golden`, for a change of the maths alone; say why in the commit.
"""

import json
import tempfile
from pathlib import Path

from resroute.testing import GOLDEN, golden_losses

TARGET = Path(__file__).parents[1] / "tests" / "golden" / "losses.json"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses = {name: golden_losses(config, Path(folder)) for name, config in GOLDEN.items()}
    TARGET.write_text(json.dumps(losses, indent=1) + "\n")
    print(f"wrote {TARGET.name}: {len(losses)} methods")


if __name__ == "__main__":
    main()
