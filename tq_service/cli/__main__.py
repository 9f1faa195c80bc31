"""Entry point of `python -m tq_service.cli`, which runs the command line `tq-service`."""

from tq_service.cli import main

if __name__ == "__main__":
    main()
