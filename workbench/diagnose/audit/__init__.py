"""The pre-flight audit: silent faults that no loss curve shows, each found in seconds before a run."""

from .subject import AUDITS, Subject, audit

__all__ = ["AUDITS", "Subject", "audit"]
