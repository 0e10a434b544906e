"""Only for a process in which Triton interprets: TRITON_INTERPRET=1 pytest tests/gpu/interpreted."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
