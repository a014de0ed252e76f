"""On the PYTHONPATH of the processes that a test starts: their waits are short, and what they build is small.

Python imports this file by its name before anything else.
"""

import time
from types import SimpleNamespace

from on_import import SIZES, set_constants

LONGEST_SLEEP = 0.3
CONSTANTS = {
    **SIZES,
    "server_app.federation.grid": {"LATE_SECONDS": 1.0},
    # an idle SuperNode asks for messages every three seconds
    "flwr.supernode.start_client_internal": {
        "time": SimpleNamespace(**{**vars(time), "sleep": lambda seconds: time.sleep(min(seconds, LONGEST_SLEEP))})
    },
}
set_constants(CONSTANTS)
