"""``python -m psgc``: the command line, where the script ``psgc`` is not on the path."""

from psgc.launch.cli import main

if __name__ == "__main__":
    main()
