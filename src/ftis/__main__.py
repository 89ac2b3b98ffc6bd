"""``python -m ftis``: the same as ``ftis``.

Python looks for ``ftis`` in the current directory first, unless ``-P`` is given; later imports do not look there.
"""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current directory

from ftis.cli import main

main()
