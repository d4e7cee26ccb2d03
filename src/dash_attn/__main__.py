"""`python -m dash_attn` is the command `dash-attn`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
