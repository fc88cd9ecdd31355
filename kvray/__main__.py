"""`python -m kvray` is the command `kvray`."""

from kvray.cli import main

if __name__ == "__main__":
    main()
