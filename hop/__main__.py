"""python -m hop: the command line (hop.cli)."""

import sys

from hop.cli import main

if __name__ == "__main__":
    sys.exit(main(program="python -m hop"))
