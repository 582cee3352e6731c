"""URLs of stores: what may stand in one. A Recipe is written to files, logs and exports, so no secret may be in it."""

from __future__ import annotations

import re

# A secret may hold slashes (those of AWS do), so that everything up to the last @ is looked at.
_USER_AND_PASSWORD = re.compile(r"://[^@]*:.*@", re.DOTALL)


def is_url(path: object) -> bool:
    """Whether this is a URL of a store and no path of this machine."""
    return isinstance(path, str) and "://" in path


def credentials_in(url: str) -> str:
    """Return what is wrong with a URL that holds credentials, without repeating them; empty for one that holds none."""
    if _USER_AND_PASSWORD.search(url):
        seen = "a user name with a password"
    elif "?" in url:
        seen = "a query (what follows the ?), where tokens are passed"
    else:
        return ""
    return (
        f"the URL holds {seen}, and would be written to the run folder and its logs. Give the URL without it, and "
        "credentials by the environment (AWS_ACCESS_KEY_ID ..., or FSSPEC_<PROTOCOL>_<ARGUMENT> for any store)."
    )
