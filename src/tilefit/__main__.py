"""``python -m tilefit``."""

import sys

if not sys.flags.safe_path:
    # The current folder, which ``-m`` puts first: a file there that is called like a module of the standard
    # library would take its place. The command ``tilefit`` does not search it either.
    del sys.path[0]

from tilefit.cli import main

main()
