"""A peer's identity: its ed25519 key and the run's roster of public keys.

    <name>.key      private key, PKCS#8 PEM, readable by its owner only
    <name>.pub      public key: 64 hex digits and the peer's name
    roster.toml     [peers]  <name> = "<public key>"

The key proves whose rollouts these are; a certificate (:mod:`ftis.swarm.certificates`) only lets a peer connect.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ftis.config import PEER_NAME, FtisError

Roster = Mapping[str, str]
"""Peer name -> public key, 64 lower-case hex digits."""

_HEX_KEY = re.compile(r"[0-9a-f]{64}")
UNREADABLE = (OSError, ValueError, TypeError, UnsupportedAlgorithm)
"""The errors of reading a damaged PEM or one of another kind."""


class IdentityError(FtisError):
    """A key, roster or certificate cannot be read, written or trusted."""


def public_hex(key: Ed25519PrivateKey) -> str:
    """The public key of ``key``: 64 lower-case hex digits."""
    return key.public_key().public_bytes_raw().hex()


def verify(public: str, data: bytes, signature: bytes) -> bool:
    """Whether the key ``public`` (hex) signed ``data`` with ``signature``."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def require_new(directory: Path, names: Sequence[str], endings: Sequence[str]) -> None:
    """Refuse names that are no peers', that are given twice, or that have a file ``<name><ending>`` already.

    Raises:
        IdentityError: there is one.
    """
    for name in names:
        check_name(name)
        if names.count(name) > 1:
            raise IdentityError(f"the name {name!r} is given twice; give each peer its own")
        for path in (directory / f"{name}{ending}" for ending in endings):
            if path.exists():
                raise IdentityError(f"{path} exists already: move it away to make a new one")


def new_key(directory: Path, name: str) -> str:
    """Write ``<name>.key`` and ``<name>.pub``. Returns the public key as hex.

    Raises:
        IdentityError: ``name`` is not a peer's name, or the key exists already.
    """
    check_name(name)
    key = Ed25519PrivateKey.generate()
    write_private(directory / f"{name}.key", key)
    write(directory / f"{name}.pub", f"{public_hex(key)} {name}\n".encode("ascii"))
    return public_hex(key)


def kept_key(directory: Path, name: str) -> Ed25519PrivateKey:
    """The private key of ``name`` in ``directory``; a missing one is made."""
    path = directory / f"{name}.key"
    if not path.exists():
        new_key(directory, name)
    return load_key(path)


def load_key(path: Path) -> Ed25519PrivateKey:
    """The private key in ``path``.

    Raises:
        IdentityError: the file is missing, or does not hold an ed25519 key.
    """
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        raise IdentityError(f"no key at {path}: make one with ftis keys new") from None
    except UNREADABLE as error:
        raise IdentityError(f"{path} cannot be read as a private key ({error}): make one with ftis keys new") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(f"{path} holds a key of another kind than ed25519: make one with ftis keys new")
    return key


def collect_roster(public_files: Iterable[Path]) -> dict[str, str]:
    """The roster of the peers whose ``.pub`` files are given.

    Raises:
        IdentityError: a file does not hold a public key, or a name or key occurs twice.
    """
    roster: dict[str, str] = {}
    for path in public_files:
        try:
            public, _, name = path.read_text(encoding="ascii").strip().partition(" ")
        except (OSError, ValueError) as error:
            raise IdentityError(f"{path} cannot be read: {error}") from None
        if not _HEX_KEY.fullmatch(public) or not PEER_NAME.fullmatch(name):
            what = "a public key (64 hex digits and a peer's name)"
            raise IdentityError(f"{path} is not {what}: give a .pub file of ftis keys new")
        if name in roster or public in roster.values():
            raise IdentityError(f"{path}: the name {name!r} or its key is given twice; leave one of the files out")
        roster[name] = public
    return roster


def roster_text(roster: Roster) -> str:
    """A roster as the TOML that :func:`read_roster` reads."""
    lines = [f'"{name}" = "{public}"' for name, public in sorted(roster.items())]
    return "\n".join(["# The public keys of a run's peers, the same file for each of them.", "[peers]", *lines, ""])


def roster_digest(roster: Roster | None) -> str:
    """The fact about the roster that a run's peers must agree on; None stands for an open swarm."""
    return hashlib.sha256(roster_text(roster).encode()).hexdigest() if roster is not None else "open"


def read_roster(path: Path) -> dict[str, str]:
    """The roster in ``path``.

    Raises:
        IdentityError: the file is missing, or is not a table of names and public keys.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise IdentityError(f"no roster at {path}: make one with ftis keys roster") from None
    except (OSError, ValueError, RecursionError) as error:
        raise IdentityError(f"{path} cannot be read as a roster: {error}") from None
    peers = document.get("peers")
    if set(document) != {"peers"} or not isinstance(peers, dict):
        raise IdentityError(f"{path}: a roster has one table, [peers], of names and public keys")
    for name, public in peers.items():
        if not PEER_NAME.fullmatch(name):
            raise IdentityError(f"{path}: {name[:80]!r} is not a peer's name (letters, digits, '_', '.', '-')")
        if not isinstance(public, str) or not _HEX_KEY.fullmatch(public):
            shown = repr(public[:80]) if isinstance(public, str) else f"of type {type(public).__name__}"
            raise IdentityError(f"{path}: the key of {name} is {shown}, not a text of 64 lower-case hex digits")
    if len(set(peers.values())) < len(peers):
        raise IdentityError(f"{path}: two peers have the same key; give each its own")
    return peers


def check_name(name: str) -> None:
    """Refuse a name that is not a peer's, by an IdentityError."""
    if not PEER_NAME.fullmatch(name):
        raise IdentityError(f"{name!r} is not a peer's name (letters, digits, '_', '.', '-')")


def write_private(path: Path, key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> None:
    """Write a private key to a new file that only its owner can read, or raise an IdentityError."""
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    if path.exists():
        raise IdentityError(f"{path} exists already, and rosters name its public key: move it away to make a new one")
    write(path, pem, os.O_EXCL, mode=0o600)


def write(path: Path, data: bytes, flags: int = os.O_TRUNC, mode: int = 0o666) -> None:
    """Write a file, and the directories above it, or raise an IdentityError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | flags, mode), "wb") as file:
            file.write(data)
    except OSError as error:
        raise IdentityError(f"{path} cannot be written ({error})") from None
