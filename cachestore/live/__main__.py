"""`python -m cachestore.live`, also as `accelerate launch -m cachestore.live` and `torchrun -m cachestore.live`."""

import sys

from cachestore.live.front import main

if __name__ == "__main__":
    main(sys.argv[1:])
