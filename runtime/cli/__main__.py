"""python -m ingot.runtime.cli, where the console script `ingot` is not on the path."""

import sys

from . import main

sys.exit(main())
