"""Keys, rosters and certificates: what is written, who may read it, and files that are not what they should be."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import os
import ssl
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import ftis
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from ftis import config
from ftis.swarm import identity
from ftis.swarm.identity import (
    IdentityError,
    collect_roster,
    load_key,
    new_certificates,
    new_key,
    public_hex,
    read_roster,
    roster_text,
    verify,
)

ADA, BOB = "a1" * 32, "b2" * 32
SHARED_DIRECTORY = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
BAD_NAMES = ["", " ", "-a", ".a", "a/b", "../a", "a b", "a\n", "é", "a" * 65, "a\x00"]


def pem(key: PrivateKeyTypes, password: bytes | None = None) -> bytes:
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)


def unheard_of_kind() -> bytes:
    """A well-formed private key of an algorithm that nobody knows."""
    der = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    known, unknown = bytes.fromhex("06072a8648ce3d0201"), bytes.fromhex("06072a8648ce3d0255")
    assert known in der
    text = base64.encodebytes(der.replace(known, unknown))
    return b"-----BEGIN PRIVATE KEY-----\n" + text + b"-----END PRIVATE KEY-----\n"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_is_written_for_its_owner_only_and_reads_back(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        public = new_key(tmp_path / "deep" / "keys", "ada")
    finally:
        os.umask(before)
    directory = tmp_path / "deep" / "keys"
    assert sorted(p.name for p in directory.iterdir()) == ["ada.key", "ada.pub"]
    assert mode(directory / "ada.key") == 0o600
    assert (directory / "ada.pub").read_bytes() == f"{public} ada\n".encode()
    assert public_hex(load_key(directory / "ada.key")) == public
    assert len(bytes.fromhex(public)) == 32


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    new_key(tmp_path, "ada")
    before = contents(tmp_path)
    with pytest.raises(IdentityError, match=r"ada\.key exists already"):
        new_key(tmp_path, "ada")
    assert contents(tmp_path) == before
    assert new_key(tmp_path, "bob") not in before["ada.pub"].decode()


def test_a_key_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "ada.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IdentityError, match="cannot be written"):
        new_key(tmp_path, "ada")
    assert not (tmp_path / "elsewhere").exists()


def test_a_place_that_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(IdentityError, match=r"ada\.key cannot be written"):
            new_key(directory, "ada")
        with pytest.raises(IdentityError, match=r"ca\.key cannot be written"):
            new_certificates(directory, ["ada"])


def test_names_are_the_recipes_names_and_another_writes_nothing(tmp_path: Path) -> None:
    recipes = TypeAdapter(config.Name)
    for name in ["a", "0", "a" * 64, "A-b_c.d"]:
        recipes.validate_python(name)
        new_key(tmp_path / "good", name)
    for name in BAD_NAMES:
        with pytest.raises(ValidationError):
            recipes.validate_python(name)
        with pytest.raises(IdentityError, match="is not a peer's name"):
            new_key(tmp_path / "keys", name)
        with pytest.raises(IdentityError, match="is not a peer's name"):
            new_certificates(tmp_path / "keys", ["ada", name])
    assert not (tmp_path / "keys").exists()


WRONG_KEYS: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "cannot be read as a private key"),
    "noise": (lambda: bytes(range(256)), "cannot be read as a private key"),
    "no key inside": (
        lambda: b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        "cannot be read as a private key",
    ),
    "cut off": (lambda: pem(ed25519.Ed25519PrivateKey.generate())[:60], "cannot be read as a private key"),
    "with a passphrase": (lambda: pem(ed25519.Ed25519PrivateKey.generate(), b"secret"), "Password was not given"),
    "of an unknown kind": (unheard_of_kind, "cannot be read as a private key"),
    "elliptic": (lambda: pem(ec.generate_private_key(ec.SECP256R1())), "another kind than ed25519"),
    "rsa": (lambda: pem(rsa.generate_private_key(65537, 2048)), "another kind than ed25519"),
    "public": (
        lambda: (
            ed25519.Ed25519PrivateKey.generate()
            .public_key()
            .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        ),
        "cannot be read as a private key",
    ),
}


def test_a_file_that_is_no_signing_key_says_so(tmp_path: Path) -> None:
    path = tmp_path / "ada.key"
    for make, says in WRONG_KEYS.values():
        path.write_bytes(make())
        with pytest.raises(IdentityError, match=says) as caught:
            load_key(path)
        assert str(path) in str(caught.value)
    with pytest.raises(IdentityError, match="make one with ftis keys new"):
        load_key(tmp_path / "bob.key")
    with pytest.raises(IdentityError, match="cannot be read"):
        load_key(tmp_path)


@given(st.lists(st.tuples(st.integers(0, 118), st.integers(0, 255)), min_size=1, max_size=3))
@settings(SHARED_DIRECTORY, max_examples=300)
def test_a_damaged_key_is_a_key_or_an_identity_error(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    data = bytearray(pem(key))
    assert len(data) == 119
    for at, value in changes:
        data[at] = value
    path = tmp_path / "ada.key"
    path.write_bytes(data)
    try:
        read = load_key(path)
    except IdentityError:
        return
    assert isinstance(read, ed25519.Ed25519PrivateKey)


# --- signatures -------------------------------------------------------------------------------------------------------


def test_a_signature_is_of_one_key_on_one_text(tmp_path: Path) -> None:
    ada, bob = (new_key(tmp_path, name) for name in ("ada", "bob"))
    signature = load_key(tmp_path / "ada.key").sign(b"data")
    assert verify(ada, b"data", signature)
    assert not verify(bob, b"data", signature)
    assert not verify(ada, b"Data", signature)
    assert not verify(ada, b"", signature)
    for at in range(len(signature) * 8):
        flipped = bytearray(signature)
        flipped[at // 8] ^= 1 << at % 8
        assert not verify(ada, b"data", bytes(flipped))


@given(st.binary(max_size=80), st.sampled_from([ADA, "", "a1", "zz" * 32, "a1" * 33, "ff" * 32, "é" * 64]))
def test_no_other_bytes_and_no_other_key_are_a_signature(signature: bytes, public: str) -> None:
    assert verify(public, b"data", signature) is False


def test_a_published_vector_of_ed25519() -> None:
    """RFC 8032, section 7.1, test 3: our hex is the hex that everybody else writes."""
    key = ed25519.Ed25519PrivateKey.from_private_bytes(
        bytes.fromhex("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7")
    )
    assert public_hex(key) == "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025"
    signature = bytes.fromhex(
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a"
    )
    assert key.sign(b"\xaf\x82") == signature
    assert verify(public_hex(key), b"\xaf\x82", signature)


# --- rosters ----------------------------------------------------------------------------------------------------------


def test_a_roster_of_public_files_reads_back(tmp_path: Path) -> None:
    publics = {name: new_key(tmp_path, name) for name in ("bob", "ada", "c.d-e_f")}
    roster = collect_roster(tmp_path / f"{name}.pub" for name in publics)
    assert roster == publics
    path = tmp_path / "roster.toml"
    path.write_text(roster_text(roster), encoding="utf-8")
    assert read_roster(path) == publics


def test_a_roster_is_not_replaced_by_one_that_lacks_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for directory in ("ours", "theirs"):
        assert ftis("keys", "new", "ada", "bob", "-d", directory) == 0
    assert ftis("keys", "roster", "ours/ada.pub") == 0
    assert ftis("keys", "roster", "ours/ada.pub", "ours/bob.pub") == 0  # it has one more
    before = (tmp_path / "roster.toml").read_bytes()
    for files in (["ours/ada.pub"], ["ours/ada.pub", "theirs/bob.pub"]):
        assert ftis("keys", "roster", *files) == 1
        assert "roster.toml is a roster with other keys of bob: delete it, or name" in capsys.readouterr().err
    assert (tmp_path / "roster.toml").read_bytes() == before
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert ftis("keys", "roster", "ours/ada.pub", "-o", "notes.txt") == 1
    assert "Delete it, or name another --output" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert ftis("keys", "roster", "theirs/bob.pub", "-o", "another.toml") == 0


def test_golden_roster() -> None:
    lines = f'[peers]\n"a.d-a" = "{ADA}"\n"bob" = "{BOB}"\n'
    assert roster_text({"bob": BOB, "a.d-a": ADA}).partition("\n")[2] == lines


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True),
        st.binary(min_size=32, max_size=32).map(bytes.hex),
        max_size=8,
    ).filter(lambda roster: len(set(roster.values())) == len(roster))
)
@SHARED_DIRECTORY
def test_every_roster_makes_the_round_trip(tmp_path: Path, roster: dict[str, str]) -> None:
    path = tmp_path / "roster.toml"
    path.write_text(roster_text(roster), encoding="utf-8")
    assert read_roster(path) == roster


def toml(*lines: str) -> bytes:
    return "\n".join(["[peers]", *lines, ""]).encode()


DIGITS = "not a text of 64 lower-case hex digits"
BAD_ROSTERS = [
    (b"ada: a1a1", "cannot be read as a roster"),
    (b"[peers]\n\xff = 1", "cannot be read as a roster"),
    (b"peers = " + b"[" * 5000, "cannot be read as a roster"),
    (toml(f'ada = "{ADA}"', f'ada = "{BOB}"'), "cannot be read as a roster"),
    *((data, "one table, [peers]") for data in (b"", b"[people]\n", b"peers = 3\n", b"[[peers]]\n")),
    (toml(f'ada = "{ADA}"', "[more]"), "one table, [peers]"),
    (toml(f'ada = "{ADA}"', f'bob = "{ADA}"'), "two peers have the same key"),
    *((toml(f'ada = "{key}"'), DIGITS) for key in (ADA[2:], f"{ADA}00", f"{ADA[:63]} ", f"{ADA}\\n", "١" * 64)),
    *((toml(f'ada = "{key}"'), f"the key of ada is '{key}'") for key in (ADA.upper(), "g" * 64)),
    *((toml(f"ada = {number}"), "the key of ada is of type int") for number in ("1", f"0x{'f' * 5000}")),
    (toml(f'ada = ["{ADA}"]'), "the key of ada is of type list"),
    (toml("[peers.ada]", f'key = "{ADA}"'), "the key of ada is of type dict"),
    *((toml(line), "the key of a is of type dict") for line in (f'a.d = "{ADA}"', f"{'a.' * 3000}a = 1")),
    (toml(f'"a/b" = "{ADA}"'), "'a/b' is not a peer's name"),
    (toml(f'"\\u001b[2J" = "{ADA}"'), r"'\x1b[2J' is not a peer's name"),
    (toml(f'"{"a" * 9999}" = "{ADA}"'), "is not a peer's name"),
]


def test_a_bad_roster_is_refused_by_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "roster.toml"
    with pytest.raises(IdentityError, match="make one with ftis keys roster"):
        read_roster(path)
    with pytest.raises(IdentityError, match="cannot be read"):
        read_roster(tmp_path)
    for data, says in BAD_ROSTERS:
        path.write_bytes(data)
        with pytest.raises(IdentityError) as caught:
            read_roster(path)
        text = str(caught.value)
        assert says in text
        assert str(path) in text
        assert len(text) < 500
        assert text.isprintable()


# fmt: off
TOML_PIECES = [
    "[peers]\n", "[[peers]]\n", "ada", "bob", " = ", f'"{ADA}"', f'"{BOB}"', "\n", ".", "'", '"', '"""', "{", "}", "[",
    "]", "#", ",", "1", "-", "0x1", "1e9", "nan", "true", "\\u0000", "é", "1979-05-27T07:32:00Z", "\r",
]
# fmt: on
some_toml = st.lists(st.sampled_from(TOML_PIECES), max_size=30).map(lambda pieces: "".join(pieces).encode())


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode), some_toml))
@settings(SHARED_DIRECTORY, max_examples=1000)
def test_any_bytes_are_a_roster_or_an_identity_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "roster.toml"
    path.write_bytes(data)
    try:
        roster = read_roster(path)
    except IdentityError:
        return
    assert tomllib.loads(roster_text(roster)) == {"peers": roster}


def test_a_bad_public_file_is_named(tmp_path: Path) -> None:
    good, bad = tmp_path / "ada.pub", tmp_path / "bad.pub"
    good.write_text(f"{ADA} ada\n")
    assert collect_roster([good]) == {"ada": ADA}
    for text, says in [
        *((text, "is not a public key") for text in ("", ADA, f"{ADA} a/b", f"{ADA} ada\n{BOB} bob", "-----BEGIN")),
        (f"{ADA.upper()} ada", "is not a public key"),
        (f"{ADA} adà", "cannot be read"),
        (f"{ADA} bob", "is given twice"),
        (f"{BOB} ada", "is given twice"),
    ]:
        bad.write_text(f"{text}\n", encoding="utf-8")
        with pytest.raises(IdentityError, match=says) as caught:
            collect_roster([good, bad])
        assert str(bad) in str(caught.value)
    with pytest.raises(IdentityError, match="cannot be read"):
        collect_roster([good, tmp_path / "missing.pub"])


# --- certificates -----------------------------------------------------------------------------------------------------


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def handshake(directory: Path, host: str, server: str = "ada", client: str = "bob") -> str:
    """A handshake by mutual TLS in memory; the name that the server saw in the client's certificate."""
    at_server, at_client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    at_server.verify_mode = ssl.CERT_REQUIRED
    for context, name in ((at_server, server), (at_client, client)):
        context.load_verify_locations(directory / "ca.pem")
        context.load_cert_chain(directory / f"{name}.pem", directory / f"{name}.tls.key")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [at_client.wrap_bio(down, up, server_hostname=host), at_server.wrap_bio(up, down, server_side=True)]
    for _ in range(4):
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    peer: Any = ends[1].getpeercert()
    return str(dict(pair for (pair,) in peer["subject"])["commonName"])


def test_certificates_are_of_the_authority_and_name_the_peer_and_its_hosts(tmp_path: Path) -> None:
    new_certificates(tmp_path, ["ada", "bob"], ["swarm.example.org", "10.1.2.3", "::1", "localhost"])
    authority = certificate(tmp_path / "ca.pem")
    authority.verify_directly_issued_by(authority)
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    serials = {authority.serial_number}
    for name in ("ada", "bob"):
        made = certificate(tmp_path / f"{name}.pem")
        made.verify_directly_issued_by(authority)
        serials.add(made.serial_number)
        assert [a.value for a in made.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == [name]
        constraints = made.extensions.get_extension_for_class(x509.BasicConstraints)
        assert constraints.critical
        assert constraints.value.ca is False
        hosts = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert hosts.get_values_for_type(x509.DNSName) == [name, "localhost", "swarm.example.org"]
        assert hosts.get_values_for_type(x509.IPAddress) == [
            ipaddress.ip_address(a) for a in ("127.0.0.1", "10.1.2.3", "::1")
        ]
        uses = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert set(uses) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
        now = datetime.datetime.now(datetime.UTC)
        assert made.not_valid_before_utc < now < made.not_valid_after_utc
        assert (made.not_valid_after_utc - now).days in (identity.CERTIFICATE_DAYS - 1, identity.CERTIFICATE_DAYS)
        key = serialization.load_pem_private_key((tmp_path / f"{name}.tls.key").read_bytes(), None)
        assert key.public_key() == made.public_key()
        assert mode(tmp_path / f"{name}.tls.key") == 0o600
    assert len(serials) == 3
    assert mode(tmp_path / "ca.key") == 0o600


def test_peers_shake_hands_by_any_of_their_hosts_and_no_other(tmp_path: Path) -> None:
    new_certificates(tmp_path, ["ada", "bob"], ["swarm.example.org", "10.1.2.3"])
    for host in ("ada", "localhost", "127.0.0.1", "swarm.example.org", "10.1.2.3"):
        assert handshake(tmp_path, host) == "bob"
    for host in ("bob", "10.1.2.4", "example.org"):
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            handshake(tmp_path, host)


def test_a_peer_of_another_authority_is_no_peer(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    new_certificates(ours, ["ada", "bob"])
    new_certificates(theirs, ["eve"])
    for suffix in ("pem", "tls.key"):
        (ours / f"eve.{suffix}").write_bytes((theirs / f"eve.{suffix}").read_bytes())
    assert handshake(ours, "ada") == "bob"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(ours, "ada", client="eve")
    with pytest.raises(InvalidSignature):
        certificate(ours / "eve.pem").verify_directly_issued_by(certificate(ours / "ca.pem"))


def test_a_peers_certificate_signs_no_other(tmp_path: Path) -> None:
    """A peer that plays the authority is found out: its certificate says that it is none."""
    new_certificates(tmp_path, ["ada", "bob"])
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "ca.key").write_bytes((tmp_path / "bob.tls.key").read_bytes())
    (theirs / "ca.pem").write_bytes((tmp_path / "bob.pem").read_bytes())
    new_certificates(theirs, ["eve"])
    (tmp_path / "eve.tls.key").write_bytes((theirs / "eve.tls.key").read_bytes())
    (tmp_path / "eve.pem").write_bytes((theirs / "eve.pem").read_bytes() + (tmp_path / "bob.pem").read_bytes())
    certificate(tmp_path / "eve.pem").verify_directly_issued_by(certificate(tmp_path / "bob.pem"))
    with pytest.raises(ssl.SSLCertVerificationError, match="invalid CA"):
        handshake(tmp_path, "ada", client="eve")


def test_a_second_call_keeps_the_authority(tmp_path: Path) -> None:
    new_certificates(tmp_path, ["ada"])
    before = contents(tmp_path)
    new_certificates(tmp_path, ["bob"])
    after = contents(tmp_path)
    assert set(after) - set(before) == {"bob.pem", "bob.tls.key"}
    assert after.items() >= before.items()
    assert handshake(tmp_path, "ada") == "bob"


def test_what_cannot_be_certified_leaves_everything_as_it_was(tmp_path: Path) -> None:
    new_certificates(tmp_path, ["ada"])
    before = contents(tmp_path)
    cases: list[tuple[list[str], list[str], str]] = [
        (["bob", "ada"], [], "exists already"),
        (["bob", "ca"], [], "overwrite the authority"),
        (["bob", "bob"], [], "given twice"),
        (["bob", "b/ob"], [], "is not a peer's name"),
        (["bob"], ["example.org:7447"], "without a port"),
        (["bob"], ["exämple.org"], "in ASCII"),
        (["bob"], [""], "is not a host"),
        (["bob"], ["10.0.0.1/8"], "is not a host"),
    ]
    for names, hosts, says in cases:
        with pytest.raises(IdentityError, match=says):
            new_certificates(tmp_path, names, hosts)
        assert contents(tmp_path) == before


def swap_key(directory: Path) -> None:
    (directory / "ca.key").write_bytes(pem(ec.generate_private_key(ec.SECP256R1())))


BROKEN_AUTHORITIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no certificate": (lambda d: (d / "ca.pem").unlink(), "cannot be read"),
    "no key": (lambda d: (d / "ca.key").unlink(), r"ca\.pem is there without its ca\.key"),
    "a damaged key": (lambda d: (d / "ca.key").write_bytes(b"-----BEGIN"), "cannot be read"),
    "a damaged certificate": (lambda d: (d / "ca.pem").write_bytes(b"-----BEGIN"), "cannot be read"),
    "a key with a passphrase": (
        lambda d: (d / "ca.key").write_bytes(pem(ec.generate_private_key(ec.SECP256R1()), b"secret")),
        "Password was not given",
    ),
    "a key of an unknown kind": (lambda d: (d / "ca.key").write_bytes(unheard_of_kind()), "cannot be read"),
    "a signing key": (
        lambda d: (d / "ca.key").write_bytes(pem(ed25519.Ed25519PrivateKey.generate())),
        "not a key of ftis keys new --tls",
    ),
    "another key": (swap_key, r"ca\.key is not the key of"),
}


def test_an_authority_that_is_not_whole_is_neither_used_nor_replaced(tmp_path: Path) -> None:
    for number, (breaks, says) in enumerate(BROKEN_AUTHORITIES.values()):
        place = tmp_path / str(number)
        new_certificates(place, ["ada"])
        breaks(place)
        before = contents(place)
        with pytest.raises(IdentityError, match=says):
            new_certificates(place, ["bob"])
        assert contents(place) == before
