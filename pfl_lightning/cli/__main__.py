"""``python -m pfl_lightning.cli`` is ``pfl``."""

from pfl_lightning.cli.main import main

if __name__ == "__main__":
    main()
