"""`kvjax calibrate` from a checkout: python scripts/calibrate.py --help."""

from kvjax.__main__ import main

if __name__ == "__main__":
    main("calibrate")
