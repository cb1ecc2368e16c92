"""``python -m psgc.reproduce espresso|byteps|hipress|utility``."""

import sys

from psgc.reproduce.harness import main

if __name__ == "__main__":
    sys.exit(main())
