"""`kvjax evaluate` from a checkout: python scripts/evaluate.py --help."""

from kvjax.__main__ import main

if __name__ == "__main__":
    main("evaluate")
