"""Certificates for TLS in a private swarm, and their authority.

    ca.pem, ca.key, <name>.pem, <name>.tls.key    made by ``ftis keys new --tls``

The signing key proves whose rollouts these are; the certificate only lets a peer connect. They are separate, so a thief
of one does not have the other.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ftis.swarm.identity import UNREADABLE, IdentityError, require_new, write, write_private

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_.-]{1,253}")
CERTIFICATE_DAYS = 825


def new_certificates(directory: Path, names: Sequence[str], hosts: Sequence[str] = ()) -> None:
    """Make a certificate per peer for mutual TLS, and their authority unless ``directory`` has one.

    Args:
        hosts: DNS names or addresses of the peers; they go into each certificate.

    Raises:
        IdentityError: a name or host is bad, a peer has a certificate already, or the authority is damaged or
            incomplete. Nothing is written then.
    """
    if "ca" in names:
        raise IdentityError("a certificate for 'ca' would overwrite the authority's ca.pem: give it another name")
    require_new(directory, names, (".tls.key", ".pem"))
    known_as = {name: [_host(h) for h in dict.fromkeys([name, "localhost", "127.0.0.1", *hosts])] for name in names}
    authority_key, authority = _authority(directory)
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _certificate(_named(name), authority.subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName(known_as[name]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        write_private(directory / f"{name}.tls.key", key)
        write(directory / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM))


def network_keys(of: Path) -> dict[str, str]:
    """The keys of ``[network]`` for a peer's certificate; ``of`` is its path without the ending."""
    return {"tls_authority": str(of.parent / "ca.pem"), "tls_certificate": f"{of}.pem", "tls_key": f"{of}.tls.key"}


def _authority(directory: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key_file, certificate_file = directory / "ca.key", directory / "ca.pem"
    if key_file.exists():
        try:
            key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
            owner = certificate.public_key()
        except UNREADABLE as error:
            remedy = "bring back its ca.key and ca.pem"
            raise IdentityError(f"the authority in {directory} cannot be read ({error}): {remedy}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise IdentityError(f"{key_file} is not a key of ftis keys new --tls: use another directory")
        if key.public_key() != owner:
            raise IdentityError(f"{key_file} is not the key of {certificate_file}: bring back the right one")
        return key, certificate
    if certificate_file.exists():
        raise IdentityError(f"{certificate_file} is there without its ca.key: bring it back or use another directory")
    key, subject = ec.generate_private_key(ec.SECP256R1()), _named("ftis swarm authority")
    certificate = (
        _certificate(subject, subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    write_private(key_file, key)
    write(certificate_file, certificate.public_bytes(serialization.Encoding.PEM))
    return key, certificate


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


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
        if _HOST.fullmatch(host):
            return x509.DNSName(host)
    raise IdentityError(f"{host!r} is not a host: give its address or DNS name in ASCII, without a port")
