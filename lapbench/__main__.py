"""``python -m lapbench``: the same as the ``lapbench`` command."""

import sys

from lapbench.cli import main

if __name__ == "__main__":
    sys.exit(main())
