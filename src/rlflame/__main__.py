"""`python -m rlflame` is the same command as `rlflame`."""

from rlflame.cli import main

if __name__ == "__main__":
    main()
