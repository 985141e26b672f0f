"""``python -m tilefit``."""

from tilefit.cli import main

main()
