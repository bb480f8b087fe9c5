"""``python -m upstream.simulator MODEL …``."""

from __future__ import annotations

import sys

from upstream.simulator import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
