"""`python -m hilore_cli` is `hilore`."""

from hilore_cli.cli import main

if __name__ == "__main__":
    main()
