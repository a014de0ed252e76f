"""Where the tests find the real survey files, which nobody may publish here."""

import os
from pathlib import Path

import pytest

SURVEYS = Path(os.environ.get("APPA_SURVEYS") or "/nowhere").absolute()
GLOBALQA = SURVEYS / "globalqa.jsonl"
needs_surveys = pytest.mark.skipif(not GLOBALQA.is_file(), reason="APPA_SURVEYS names no folder of real survey files")
