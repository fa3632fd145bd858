"""`kvjax convert` from a checkout: python scripts/convert.py --help."""

from kvjax.__main__ import main

if __name__ == "__main__":
    main("convert")
