"""Python runs this file at its start where PYTHONPATH names this folder: scrambles times in processes that tests start (scrambled_times.py)."""

import os
import sys
from pathlib import Path

if os.environ.get("WHET_SCRAMBLED_TIMES"):
    sys.path.append(str(Path(__file__).parents[1]))
    from scrambled_times import patch_when_imported

    sys.path.pop()
    patch_when_imported()
