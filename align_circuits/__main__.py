"""`python -m align_circuits`: the command line."""

import sys

from align_circuits.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
