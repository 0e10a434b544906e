"""Say which interpreter runs this: the same one is found in PATH, behind a shim, or in a venv that was made of it."""

import os
import platform
import sys

base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
print(base, os.path.realpath(sys.base_prefix), sys.version.replace("\n", " "), platform.machine(), sep="|")
