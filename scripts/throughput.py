"""`kvjax throughput` from a checkout: python scripts/throughput.py --help."""

from kvjax.__main__ import main

if __name__ == "__main__":
    main("throughput")
