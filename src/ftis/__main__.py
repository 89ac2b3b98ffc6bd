"""``python -m ftis``: the same as ``ftis``.

Python finds ``ftis`` itself in the current directory first, unless it is called with ``-P``.
"""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current directory

from ftis.cli import main

main()
