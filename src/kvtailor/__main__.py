"""`python -m kvtailor` is the command `kvtailor`."""

from kvtailor.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main(prog_name="kvtailor")
