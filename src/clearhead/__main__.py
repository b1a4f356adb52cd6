"""`python -m clearhead` is the `clearhead` command."""

from clearhead.cli import main

if __name__ == "__main__":
    main()
