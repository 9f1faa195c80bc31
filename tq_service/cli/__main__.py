"""Lets `python -m tq_service.cli` be the command line."""

from tq_service.cli import main

if __name__ == "__main__":
    main()
