"""`kvjax decode` from a checkout: python scripts/decode.py --help."""

from kvjax.__main__ import main

if __name__ == "__main__":
    main("decode")
