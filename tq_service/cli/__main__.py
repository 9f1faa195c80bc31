"""Runs the `tq-service` command line when called as `python -m tq_service.cli`."""

from tq_service.cli import main

if __name__ == "__main__":
    main()
