"""Keys, rosters and certificates: what is written, who may read it, and files that are not what they should be."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import os
import shutil
import ssl
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import ftis
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from ftis import config
from ftis.swarm.certificates import CERTIFICATE_DAYS, new_certificates
from ftis.swarm.identity import (
    IdentityError,
    collect_roster,
    load_key,
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
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_key_is_written_for_its_owner_only_and_reads_back(tmp_path: Path) -> None:
    before, directory = os.umask(0), tmp_path / "deep" / "keys"
    try:
        public = new_key(directory, "ada")
    finally:
        os.umask(before)
    assert contents(directory).keys() == {"ada.key", "ada.pub"}
    assert mode(directory / "ada.key") == 0o600
    assert (directory / "ada.pub").read_bytes() == f"{public} ada\n".encode()
    assert public_hex(load_key(directory / "ada.key")) == public


def test_a_key_is_never_overwritten_nor_written_elsewhere(tmp_path: Path) -> None:
    new_key(tmp_path, "ada")
    (tmp_path / "bob.key").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").touch()
    before = contents(tmp_path)
    for directory, name, says in (
        (tmp_path, "ada", r"ada\.key exists already"),
        (tmp_path, "bob", r"bob\.key cannot be written"),
        (tmp_path / "file", "ada", r"ada\.key cannot be written"),
        (tmp_path / "file" / "deeper", "ada", r"ada\.key cannot be written"),
    ):
        with pytest.raises(IdentityError, match=says):
            new_key(directory, name)
    with pytest.raises(IdentityError, match=r"ca\.key cannot be written"):
        new_certificates(tmp_path / "file", ["ada"])
    assert contents(tmp_path) == before
    assert new_key(tmp_path, "cid") not in before["ada.pub"].decode()


def test_names_are_the_recipes_names_and_another_writes_nothing(tmp_path: Path) -> None:
    recipes = TypeAdapter(config.Name)
    for name in ["a", "0", "a" * 64, "A-b_c.d"]:
        recipes.validate_python(name)
        new_key(tmp_path / "good", name)
    for name in BAD_NAMES:
        with pytest.raises(ValidationError):
            recipes.validate_python(name)
        for make in (new_key, lambda directory, bad: new_certificates(directory, ["ada", bad])):
            with pytest.raises(IdentityError, match="is not a peer's name"):
                make(tmp_path / "keys", name)
    assert not (tmp_path / "keys").exists()


def test_a_file_that_is_no_signing_key_says_so(tmp_path: Path) -> None:
    path = tmp_path / "ada.key"
    for data, says in (
        (b"", "cannot be read as a private key"),
        (pem(ed25519.Ed25519PrivateKey.generate(), b"secret"), "Password was not given"),
        (unheard_of_kind(), "cannot be read as a private key"),
        (pem(ec.generate_private_key(ec.SECP256R1())), "another kind than ed25519"),
    ):
        path.write_bytes(data)
        with pytest.raises(IdentityError, match=says) as caught:
            load_key(path)
        assert str(path) in str(caught.value)
    for place, says in ((tmp_path / "bob.key", "make one with ftis keys new"), (tmp_path, "cannot be read")):
        with pytest.raises(IdentityError, match=says):
            load_key(place)


def test_a_published_vector_of_ed25519_and_nothing_near_it() -> None:
    """RFC 8032, section 7.1, test 3: our hex is the hex that everybody else writes."""
    key = ed25519.Ed25519PrivateKey.from_private_bytes(
        bytes.fromhex("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7")
    )
    public = "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025"
    signature = bytes.fromhex(
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a"
    )
    assert public_hex(key) == public
    assert key.sign(b"\xaf\x82") == signature
    assert verify(public, b"\xaf\x82", signature)
    for data in (b"", b"\xaf\x83"):
        assert not verify(public, data, signature)
    for bit in range(8 * len(signature)):
        flipped = (int.from_bytes(signature) ^ 1 << bit).to_bytes(len(signature))
        assert not verify(public, b"\xaf\x82", flipped)
    for another in (ADA, "", "a1", "zz" * 32, public + "00", "ff" * 32, "é" * 64):
        assert verify(another, b"\xaf\x82", signature) is False
    for other in (b"", b"x", signature[:-1], signature + b"\0"):
        assert verify(public, b"\xaf\x82", other) is False


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


def test_several_keys_are_made_all_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ftis("keys", "new", "bob") == 0
    before = sorted(tmp_path.rglob("*"))
    for names in (["ada", "bob"], ["ada", "ada"], ["ada", "no/name"]):
        assert ftis("keys", "new", *names) == 1
        assert names[1] in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_roster_is_of_public_files_and_reads_as_ever(tmp_path: Path) -> None:
    for name, public in (("bob", BOB), ("a.d-a", ADA)):
        (tmp_path / f"{name}.pub").write_text(f"{public} {name}\n")
    roster = collect_roster(tmp_path / f"{name}.pub" for name in ("bob", "a.d-a"))
    assert roster == {"bob": BOB, "a.d-a": ADA}
    assert roster_text(roster).partition("\n")[2] == f'[peers]\n"a.d-a" = "{ADA}"\n"bob" = "{BOB}"\n'
    public, bad = new_key(tmp_path, "ada"), tmp_path / "bad.pub"
    assert collect_roster([tmp_path / "ada.pub"]) == {"ada": public}
    for text, says in [
        *((text, "is not a public key") for text in ("", ADA, f"{ADA} a/b", f"{ADA} ada\n{BOB} bob", "-----BEGIN")),
        (f"{ADA.upper()} ada", "is not a public key"),
        (f"{ADA} adà", "cannot be read"),
        (f"{public} bob", "is given twice"),
        (f"{BOB} ada", "is given twice"),
    ]:
        bad.write_text(f"{text}\n", encoding="utf-8")
        with pytest.raises(IdentityError, match=says) as caught:
            collect_roster([tmp_path / "ada.pub", bad])
        assert str(bad) in str(caught.value)
    with pytest.raises(IdentityError, match="cannot be read"):
        collect_roster([tmp_path / "missing.pub"])


def toml(*lines: str) -> bytes:
    return "\n".join(["[peers]", *lines, ""]).encode()


BAD_ROSTERS = [
    (b"ada: a1a1", "cannot be read as a roster"),
    (b"peers = " + b"[" * 5000, "cannot be read as a roster"),
    *((data, "one table, [peers]") for data in (b"", b"[people]\n", b"peers = 3\n", toml(f'ada = "{ADA}"', "[more]"))),
    (toml(f'ada = "{ADA}"', f'bob = "{ADA}"'), "two peers have the same key"),
    *((toml(f'ada = "{key}"'), f"the key of ada is '{key}'") for key in (ADA[2:], f"{ADA}00", ADA.upper(), "g" * 64)),
    (toml(f"ada = 0x{'f' * 5000}"), "the key of ada is of type int"),
    (toml(f"{'a.' * 3000}a = 1"), "the key of a is of type dict"),
    (toml(f'"\\u001b[2J" = "{ADA}"'), r"'\x1b[2J' is not a peer's name"),
    (toml(f'"{"a" * 9999}" = "{ADA}"'), "is not a peer's name"),
]


def test_a_bad_roster_is_refused_by_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "roster.toml"
    for place, says in ((path, "make one with ftis keys roster"), (tmp_path, "cannot be read")):
        with pytest.raises(IdentityError, match=says):
            read_roster(place)
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


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True)
keys = st.binary(min_size=32, max_size=32).map(bytes.hex)
rosters = st.dictionaries(names, keys, max_size=8).filter(lambda roster: len(set(roster.values())) == len(roster))


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode), some_toml, rosters))
@settings(SHARED_DIRECTORY, max_examples=1000)
def test_any_bytes_are_a_roster_or_an_identity_error(tmp_path: Path, given_: bytes | dict[str, str]) -> None:
    path = tmp_path / "roster.toml"
    path.write_bytes(given_ if isinstance(given_, bytes) else roster_text(given_).encode())
    try:
        roster = read_roster(path)
    except IdentityError:
        assert isinstance(given_, bytes)
        return
    assert tomllib.loads(roster_text(roster)) == {"peers": roster}
    assert isinstance(given_, bytes) or roster == given_


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def handshake(directory: Path, host: str, client: str = "bob") -> str:
    """A handshake by mutual TLS in memory; the name that the server saw in the client's certificate."""
    at_server, at_client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    at_server.verify_mode = ssl.CERT_REQUIRED
    for context, name in ((at_server, "ada"), (at_client, client)):
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


def test_certificates_are_of_their_owners_only_and_last(tmp_path: Path) -> None:
    new_certificates(tmp_path, ["ada", "bob"], ["swarm.example.org", "::1", "localhost"])
    made = [certificate(tmp_path / f"{name}.pem") for name in ("ca", "ada", "bob")]
    now = datetime.datetime.now(datetime.UTC)
    for name, one in zip(("ca", "ada", "bob"), made, strict=True):
        one.verify_directly_issued_by(made[0])
        assert one.not_valid_before_utc < now - datetime.timedelta(hours=23)
        assert (one.not_valid_after_utc - now).days in (CERTIFICATE_DAYS - 1, CERTIFICATE_DAYS)
        assert mode(tmp_path / ("ca.key" if name == "ca" else f"{name}.tls.key")) == 0o600
        constraints = one.extensions.get_extension_for_class(x509.BasicConstraints)
        assert constraints.critical
        assert (constraints.value.ca, constraints.value.path_length) == ((True, 0) if name == "ca" else (False, None))
    assert len({one.serial_number for one in made}) == 3
    hosts = made[1].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert hosts.get_values_for_type(x509.DNSName) == ["ada", "localhost", "swarm.example.org"]
    assert hosts.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address(a) for a in ("127.0.0.1", "::1")]
    uses = made[1].extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(uses) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}


def test_peers_shake_hands_by_any_of_their_hosts_and_no_other(tmp_path: Path) -> None:
    new_certificates(tmp_path, ["ada", "bob"], ["swarm.example.org", "10.1.2.3"])
    for host in ("ada", "localhost", "127.0.0.1", "swarm.example.org", "10.1.2.3"):
        assert handshake(tmp_path, host) == "bob"
    for host in ("bob", "10.1.2.4", "example.org"):
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            handshake(tmp_path, host)


def test_a_peers_certificate_signs_no_other(tmp_path: Path) -> None:
    """A peer that plays the authority is found out: its certificate says that it is none."""
    new_certificates(tmp_path, ["ada", "bob"])
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    shutil.copy(tmp_path / "bob.tls.key", theirs / "ca.key")
    shutil.copy(tmp_path / "bob.pem", theirs / "ca.pem")
    new_certificates(theirs, ["eve"])
    shutil.copy(theirs / "eve.tls.key", tmp_path)
    (tmp_path / "eve.pem").write_bytes((theirs / "eve.pem").read_bytes() + (tmp_path / "bob.pem").read_bytes())
    certificate(tmp_path / "eve.pem").verify_directly_issued_by(certificate(tmp_path / "bob.pem"))
    with pytest.raises(ssl.SSLCertVerificationError, match="invalid CA"):
        handshake(tmp_path, "ada", client="eve")


def test_a_second_call_keeps_the_authority_and_what_cannot_be_certified_leaves_everything(tmp_path: Path) -> None:
    new_certificates(tmp_path, ["ada"])
    before = contents(tmp_path)
    for others, hosts, says in (
        (("bob", "ada"), (), "exists already"),
        (("bob", "ca"), (), "overwrite the authority"),
        (("bob", "bob"), (), "given twice"),
        (("bob",), ("example.org:7447",), "without a port"),
        (("bob",), ("exämple.org",), "in ASCII"),
        (("bob",), ("",), "is not a host"),
        (("bob",), ("10.0.0.1/8",), "is not a host"),
    ):
        with pytest.raises(IdentityError, match=says):
            new_certificates(tmp_path, others, hosts)
        assert contents(tmp_path) == before
    new_certificates(tmp_path, ["bob"])
    after = contents(tmp_path)
    assert set(after) - set(before) == {"bob.pem", "bob.tls.key"}
    assert after.items() >= before.items()
    assert handshake(tmp_path, "ada") == "bob"


BROKEN_AUTHORITIES: list[tuple[str, Callable[[], bytes] | None, str]] = [
    ("ca.pem", None, "cannot be read"),
    ("ca.pem", lambda: b"-----BEGIN", "cannot be read"),
    ("ca.key", None, r"ca\.pem is there without its ca\.key"),
    ("ca.key", lambda: b"-----BEGIN", "cannot be read"),
    ("ca.key", lambda: pem(ec.generate_private_key(ec.SECP256R1()), b"secret"), "Password was not given"),
    ("ca.key", unheard_of_kind, "cannot be read"),
    ("ca.key", lambda: pem(ed25519.Ed25519PrivateKey.generate()), "not a key of ftis keys new --tls"),
    ("ca.key", lambda: pem(ec.generate_private_key(ec.SECP256R1())), r"ca\.key is not the key of"),
]


def test_an_authority_that_is_not_whole_is_neither_used_nor_replaced(tmp_path: Path) -> None:
    for number, (file, replacement, says) in enumerate(BROKEN_AUTHORITIES):
        place = tmp_path / str(number)
        new_certificates(place, ["ada"])
        (place / file).unlink()
        if replacement is not None:
            (place / file).write_bytes(replacement())
        before = contents(place)
        with pytest.raises(IdentityError, match=says):
            new_certificates(place, ["bob"])
        assert contents(place) == before
