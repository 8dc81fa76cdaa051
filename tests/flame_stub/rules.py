"""Flame's rules for names and specs, and the statuses and texts of its refusals.

This module does not know the state.
"""

from __future__ import annotations

import re

import grpc
from flamepy.proto import types_pb2 as pb

from flame_stub.records import Resources, Session

DEFAULT_RESREQ = Resources(cpu=1, memory=1 << 30)


class Refused(Exception):
    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def not_found(text: str) -> Refused:
    return Refused(grpc.StatusCode.NOT_FOUND, text)


def already(text: str) -> Refused:
    return Refused(grpc.StatusCode.ALREADY_EXISTS, text)


def invalid(text: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, text)


def internal(text: str) -> Refused:
    return Refused(grpc.StatusCode.INTERNAL, text)


def check_name(name: str) -> None:
    """Flame's rules for the names of applications."""
    if not name:
        raise invalid("application name cannot be empty")
    if len(name) > 253:
        raise invalid("application name exceeds maximum length of 253 characters")
    if ".." in name or "/" in name or "\\" in name:
        said = "application name contains invalid characters (path traversal)"
        raise invalid(f"{said}: {name}")
    if name[0] in ".-":
        raise invalid(f"application name cannot start with '.' or '-': {name}")
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        said = "application name contains invalid characters (only alphanumeric, '-', '_', '.'"
        raise invalid(f"{said} allowed): {name}")


def complete(spec: pb.SessionSpec) -> pb.SessionSpec:
    """The spec with the session manager's defaults."""
    kept = pb.SessionSpec()
    kept.CopyFrom(spec)
    kept.batch_size = max(1, kept.batch_size)
    if not kept.HasField("resreq"):
        kept.resreq.CopyFrom(DEFAULT_RESREQ.message())
    return kept


def compare(session: Session, asked: pb.SessionSpec) -> None:
    """Refuse to open a session with a different spec, apart from the common data."""
    for field in ("application", "resreq", "min_instances", "max_instances", "batch_size"):
        has, wants = getattr(session.spec, field), getattr(asked, field)
        if field == "max_instances":
            has, wants = (
                spec.max_instances if spec.HasField(field) else None
                for spec in (session.spec, asked)
            )
        if has != wants:
            text = f"{field} differs (expected {has!r}, got {wants!r})"
            raise invalid(f"session <{session.id}> spec mismatch: {text}")
