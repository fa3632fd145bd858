"""`kvjax fetch` from a checkout: python scripts/fetch.py --help."""

from kvjax.__main__ import main

if __name__ == "__main__":
    main("fetch")
