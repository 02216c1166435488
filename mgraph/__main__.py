"""`python -m mgraph`: the command line."""

import sys

from mgraph.cli import main

if __name__ == "__main__":
    sys.exit(main())
