"""`kvjax serve` from a checkout: python scripts/serve.py --help."""

from kvjax.__main__ import main

if __name__ == "__main__":
    main("serve")
