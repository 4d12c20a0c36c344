"""`python -m tests.faults`: every fault of the matrix on this machine, as a table. See docs/faults.md."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from fault_cli import main

sys.exit(main())
