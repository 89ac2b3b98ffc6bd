"""Dockerfile, compose.yaml and examples/kubernetes.yaml fit the command line, the repository and each other."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ROOT, parsed, shell_commands

from ftis.joining.join import choose_arm
from ftis.recipe.parsing import load
from ftis.version import VERSION

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = ROOT / "compose.yaml"
KUBERNETES = ROOT / "examples" / "kubernetes.yaml"
NAMES = [peer.name for peer in load(ROOT / "recipes" / "demo_three.toml").peers]


def compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    return services


def kubernetes(kind: str) -> list[dict[str, Any]]:
    documents = yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8"))
    return [document for document in documents if document["kind"] == kind]


def joined() -> list[tuple[str, list[str]]]:
    """Where, and the arguments of each ``ftis join`` of both files."""
    found = [(f"compose {name}", shlex.split(compose()[name]["command"])) for name in NAMES]
    for job in kubernetes("Job"):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        found.append((f"kubernetes {job['metadata']['name']}", container["args"]))
    return found


def test_every_peer_of_the_recipe_joins_by_a_command_that_is_one() -> None:
    peers = []
    for where, arguments in joined():
        assert arguments[0] == "join"
        values = parsed(arguments)
        peers.append(where.rpartition(" ")[2].removeprefix("ftis-"))
        assert (values["peer"], values["key"].name) == (peers[-1], f"{peers[-1]}.key")
        assert values["client"]
        assert values["resume"]  # started again after a crash, it goes on
        recipe = load(ROOT / "recipes" / "demo_three.toml", values["set_"])
        assert choose_arm(recipe, values["peer"], values["arm"])[0] == "F-TIS"
        if where.startswith("compose"):
            assert (ROOT / values["recipe"].relative_to("/")).is_file()
    assert sorted(peers) == sorted(2 * NAMES)


def test_peers_go_through_the_router_where_it_listens() -> None:
    listening = parsed(compose()["router"]["command"])["listen"]
    (deployment,), (service,) = kubernetes("Deployment"), kubernetes("Service")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    relay = parsed(container["args"])
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert deployment["spec"]["replicas"] == 1
    hosts = {"compose": ("router", listening), "kubernetes": (service["metadata"]["name"], relay["listen"])}
    for where, arguments in joined():
        host, (endpoint,) = hosts[where.split()[0]]
        kind, _, address = endpoint.partition("/")
        assert parsed(arguments)["connect"] == [f"{kind}/{host}:{address.rpartition(':')[2]}"]
    assert str(container["ports"][0]["containerPort"]) == relay["listen"][0].rpartition(":")[2]
    assert service["spec"]["ports"] == [{"port": container["ports"][0]["containerPort"]}]


def test_the_keys_of_all_are_made_once(tmp_path: Path) -> None:
    """By the shell, with an ``ftis`` that only notes its arguments."""
    (script,) = compose()["keys"]["command"]
    noted = 'ftis() { echo "$*" >> noted; test "$1 $2" != "keys $FAILS"; }; '

    def asked(**settings: str) -> list[list[str]]:
        (tmp_path / "noted").write_text("")
        subprocess.run(["sh", "-c", noted + script], cwd=tmp_path, env=dict(os.environ) | settings, check=False)
        return list(map(shlex.split, (tmp_path / "noted").read_text().splitlines()))

    new, roster = asked()
    assert sorted(parsed(new)["names"]) == sorted(NAMES)
    assert sorted(path.stem for path in parsed(roster)["public"]) == sorted(NAMES)
    assert asked(FAILS="new") == [new]
    (tmp_path / parsed(roster)["output"]).touch()
    assert asked() == []


@pytest.mark.parametrize("file", [COMPOSE, KUBERNETES], ids=lambda file: file.name)
def test_the_commands_in_comments_are_some(file: Path) -> None:
    comments = "\n".join(re.findall(r"^# +(.*)", file.read_text(encoding="utf-8"), re.MULTILINE))
    inside = re.sub(r"^.*?(?:exec \S+(?: --)?) ftis", "ftis", comments, flags=re.MULTILINE)
    commands = shell_commands(inside)
    assert commands
    for arguments in commands:
        parsed(arguments)


def test_what_a_pod_mounts_is_there() -> None:
    claims = {claim["metadata"]["name"] for claim in kubernetes("PersistentVolumeClaim")}
    made = set(re.findall(r"create (?:secret generic|configmap) (\S+)", KUBERNETES.read_text(encoding="utf-8")))
    made |= {f"ftis-{name}" for name in NAMES}  # by the loop
    for workload in [*kubernetes("Job"), *kubernetes("Deployment")]:
        pod = workload["spec"]["template"]["spec"]
        names = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for c in pod["containers"] for mount in c["volumeMounts"]} == names
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            elif "secret" in volume:
                assert volume["secret"]["secretName"] in made
            else:
                assert volume["configMap"]["name"] in made


def test_one_image_of_this_version_is_made_of_what_is_there() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (COMPOSE, KUBERNETES, ROOT / "Dockerfile"))
    assert set(re.findall(r"\bftis:\d[\w.]*", text)) == {f"ftis:{VERSION}"}
    assert compose()["keys"]["build"] == "."
    (python,) = re.findall(r"^FROM python:([\d.]+)-slim$", DOCKERFILE, re.MULTILINE)
    assert PROJECT["requires-python"] == f">={python}"
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for sources in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists()
            assert f"!{source}" in ignored
    assert re.search(r"^USER 1000:1000$", DOCKERFILE, re.MULTILINE)
    assert 'ENTRYPOINT ["ftis"]' in DOCKERFILE
    assert "ftis" in PROJECT["scripts"]
