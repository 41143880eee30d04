"""Build a retrieval index: the same as ``python -m retrieval_server.build_index``, runnable from any folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from retrieval_server.build_index import main

if __name__ == "__main__":
    sys.exit(main())
