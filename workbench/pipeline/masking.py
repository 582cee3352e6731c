"""Takes out of a text what nobody else should read: tokens and passwords, user and machine names, home folders.

Two nets, since neither catches all: what this machine is known to hold (values of variables that are named as secrets,
the hub's token file, names of user and machine), and what looks like a secret wherever it comes from.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

SECRET = "[secret]"
USER = "[user]"
HOST = "[host]"

# Names of environment variables whose value is taken for a secret.
SECRET_NAME = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|AUTH|COOKIE", re.IGNORECASE)
# Shorter values ("1", "true") would be found all over a report.
MIN_SECRET = 6
# Accounts that many machines share say nothing of a person, and are words of their own.
SHARED_NAMES = frozenset(
    {"root", "user", "admin", "ubuntu", "debian", "runner", "jovyan", "colab", "localhost", "content"}
)

_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{10,}|api_org_[A-Za-z0-9]{10,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{15,}|pypi-[\w-]{16,}|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{12,}|AIza[\w-]{20,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_AFTER_NAME = re.compile(
    r"(?i)((?:[\w-]*(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|signature)|\bsig)[\"']?\s*[:=]\s*[\"']?)"
    r"([^\s\"'&,;<][^\s\"'&,;]{5,})"
)
_BEARER = re.compile(r"(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{8,}")
_IN_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@\"']+@")
_HOMES = re.compile(r"(?i)((?:^|(?<=[^\w.~-]))/(?:home|Users)/|[A-Z]:[\\/]+Users[\\/]+)(?!\[)[^\\/\s\"':,;)]+")


class Mask:
    """Masks texts.

    Args:
        secrets: Values that must not be seen anywhere.
        users: Names of the user.
        hosts: Names of the machine.
        home: The user's home folder, which becomes ``~``.
    """

    def __init__(
        self, *, secrets: Iterable[str] = (), users: Iterable[str] = (), hosts: Iterable[str] = (), home: str = ""
    ) -> None:
        # The longest first: one secret may begin with another.
        self._secrets = sorted({one for one in secrets if len(one) >= MIN_SECRET}, key=len, reverse=True)
        self._words = [(_whole_word(name), USER) for name in _telling(users)]
        self._words += [(_whole_word(name), HOST) for name in _telling(hosts)]
        # In JSON each backslash of a Windows path stands twice.
        self._homes = [form for form in {home, home.replace("\\", "\\\\")} if len(form.strip("/\\")) > 1]

    @classmethod
    def of_this_machine(cls, environment: Mapping[str, str] | None = None) -> Mask:
        """Return a mask that knows the secrets and names of this machine.

        Args:
            environment: Takes the place of ``os.environ``.
        """
        environment = os.environ if environment is None else environment
        secrets = [value for name, value in environment.items() if SECRET_NAME.search(name)]
        home = Path.home()
        hub = Path(environment.get("HF_HOME", home / ".cache" / "huggingface"))
        for file in (Path(environment.get("HF_TOKEN_PATH", hub / "token")), home / ".huggingface" / "token"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                secrets.append(file.read_text(encoding="utf-8").strip())
        users = [home.name, *(environment.get(name, "") for name in ("USER", "LOGNAME", "USERNAME"))]
        with contextlib.suppress(Exception):  # Raises other errors on other systems where the user has no entry.
            users.append(getpass.getuser())
        host = socket.gethostname()
        return cls(secrets=secrets, users=users, hosts=[host, host.split(".")[0]], home=str(home))

    def __call__(self, text: str) -> str:
        """Return the text with everything masked that is known or looks like a secret."""
        for secret in self._secrets:
            text = text.replace(secret, SECRET)
        text = _TOKENS.sub(SECRET, text)
        text = _BEARER.sub(rf"\g<1>{SECRET}", text)
        text = _IN_URL.sub(rf"\g<1>{SECRET}@", text)
        text = _AFTER_NAME.sub(rf"\g<1>{SECRET}", text)
        for home in self._homes:
            text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
        text = _HOMES.sub(rf"\g<1>{USER}", text)
        for pattern, word in self._words:
            text = pattern.sub(word, text)
        return text


def _telling(names: Iterable[str]) -> list[str]:
    return sorted(
        {name for name in names if len(name) >= 3 and name.lower() not in SHARED_NAMES}, key=len, reverse=True
    )


def _whole_word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", re.IGNORECASE)
