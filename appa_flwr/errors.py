"""The one exception class for a user's mistake: bad config, bad data, a missing folder.

The launcher and the apps print its message on one line without a traceback; every other exception is a bug.
"""


class UserError(Exception):
    """Something the user gave is wrong; the message names the file, row or key and what would be right."""
