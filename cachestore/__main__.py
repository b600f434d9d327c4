"""`python -m cachestore`."""

import sys

from cachestore.cli import main

if __name__ == "__main__":
    sys.exit(main())
