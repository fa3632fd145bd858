"""`kvjax plot` from a checkout: python scripts/plot.py --help."""

from kvjax.__main__ import main

if __name__ == "__main__":
    main("plot")
