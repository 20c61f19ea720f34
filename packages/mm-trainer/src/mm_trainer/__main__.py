"""``python -m mm_trainer``: the command line; under torchrun, one rank."""

from mm_trainer.cli import main

if __name__ == "__main__":
    main()
