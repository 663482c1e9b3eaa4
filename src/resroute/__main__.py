"""`python -m resroute`: the command line where scripts are not on the path."""

import sys

from resroute.cli import main

if __name__ == "__main__":
    sys.exit(main())
