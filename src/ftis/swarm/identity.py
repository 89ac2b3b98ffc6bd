"""A peer's identity: its ed25519 key, the run's roster of public keys, and certificates for TLS in a private swarm.

    <name>.key      private key, PKCS#8 PEM, readable by its owner only
    <name>.pub      public key: 64 hex digits and the peer's name
    roster.toml     [peers]  <name> = "<public key>"
    ca.pem, ca.key, <name>.pem, <name>.tls.key    made by ``ftis keys new --tls``

The signing key proves whose rollouts these are; the certificate only lets a peer connect. They are separate, so a thief
of one does not have the other.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ftis.config import PEER_NAME, FtisError

Roster = Mapping[str, str]
"""Peer name -> public key, 64 lower-case hex digits."""

_HEX_KEY = re.compile(r"[0-9a-f]{64}")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_.-]{1,253}")
_UNREADABLE = (OSError, ValueError, TypeError, UnsupportedAlgorithm)
"""The errors of reading a damaged PEM or one of another kind."""
CERTIFICATE_DAYS = 825


class IdentityError(FtisError):
    """A key, roster or certificate cannot be read, written or trusted."""


def public_hex(key: Ed25519PrivateKey) -> str:
    """The public key of ``key``: 64 lower-case hex digits."""
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return raw.hex()


def verify(public: str, data: bytes, signature: bytes) -> bool:
    """Whether the key ``public`` (hex) signed ``data`` with ``signature``."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def new_key(directory: Path, name: str) -> str:
    """Write ``<name>.key`` and ``<name>.pub``. Returns the public key as hex.

    Raises:
        IdentityError: ``name`` is not a peer's name, or the key exists already.
    """
    _check_name(name)
    key = Ed25519PrivateKey.generate()
    _write_private(directory / f"{name}.key", key)
    public = public_hex(key)
    _write(directory / f"{name}.pub", f"{public} {name}\n".encode("ascii"))
    return public


def load_key(path: Path) -> Ed25519PrivateKey:
    """The private key in ``path``.

    Raises:
        IdentityError: the file is missing, or does not hold an ed25519 key.
    """
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        raise IdentityError(f"no key at {path}: make one with ftis keys new") from None
    except _UNREADABLE as error:
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
            raise IdentityError(
                f"{path} is not a public key (64 hex digits and a peer's name): give a .pub file of ftis keys new"
            )
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
        document = tomllib.loads(path.read_text(encoding="utf-8"))
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


def new_certificates(directory: Path, names: Sequence[str], hosts: Sequence[str] = ()) -> None:
    """Make a certificate per peer for mutual TLS, and their authority unless ``directory`` has one.

    Args:
        hosts: DNS names or addresses of the peers; they go into each certificate.

    Raises:
        IdentityError: a name or host is bad, a peer has a certificate already, or the authority is damaged or
            incomplete. Nothing is written then.
    """
    for name in names:
        _check_name(name)
        if name == "ca":
            raise IdentityError("a certificate for 'ca' would overwrite the authority's ca.pem: give it another name")
        if names.count(name) > 1:
            raise IdentityError(f"the name {name!r} is given twice; give each peer its own")
        for path in (directory / f"{name}.tls.key", directory / f"{name}.pem"):
            if path.exists():
                raise IdentityError(f"{path} exists already: move it away to make a new one")
    known_as = {name: [_host(h) for h in dict.fromkeys([name, "localhost", "127.0.0.1", *hosts])] for name in names}
    authority_key, authority = _authority(directory)
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            _certificate(subject, authority.subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName(known_as[name]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(authority_key, hashes.SHA256())
        )
        _write_private(directory / f"{name}.tls.key", key)
        _write(directory / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM))


def _authority(directory: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key_file, certificate_file = directory / "ca.key", directory / "ca.pem"
    if key_file.exists():
        try:
            key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
            owner = certificate.public_key()
        except _UNREADABLE as error:
            raise IdentityError(
                f"the authority in {directory} cannot be read ({error}): bring back its ca.key and ca.pem"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise IdentityError(f"{key_file} is not a key of ftis keys new --tls: use another directory")
        if key.public_key() != owner:
            raise IdentityError(f"{key_file} is not the key of {certificate_file}: bring back the right one")
        return key, certificate
    if certificate_file.exists():
        raise IdentityError(f"{certificate_file} is there without its ca.key: bring it back or use another directory")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ftis swarm authority")])
    certificate = (
        _certificate(subject, subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_private(key_file, key)
    _write(certificate_file, certificate.public_bytes(serialization.Encoding.PEM))
    return key, certificate


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=CERTIFICATE_DAYS))
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise IdentityError(
                f"{host!r} is not a host: give its address or DNS name in ASCII, without a port"
            ) from None
        return x509.DNSName(host)


def _check_name(name: str) -> None:
    if not PEER_NAME.fullmatch(name):
        raise IdentityError(f"{name!r} is not a peer's name (letters, digits, '_', '.', '-')")


def _write_private(path: Path, key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    if path.exists():
        raise IdentityError(f"{path} exists already, and rosters name its public key: move it away to make a new one")
    _write(path, pem, os.O_EXCL, mode=0o600)


def _write(path: Path, data: bytes, flags: int = os.O_TRUNC, mode: int = 0o666) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | flags, mode), "wb") as file:
            file.write(data)
    except OSError as error:
        raise IdentityError(f"{path} cannot be written ({error})") from None
