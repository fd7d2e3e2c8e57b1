"""The files of deploy/: they parse, name files that exist, and agree with each other and with
configs/serve.yaml. There is no Docker here; test_proxy.py runs nginx.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from decisionllm.bidding.server import tokens
from decisionllm.bidding.server.protocol import BoundedProtocol

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
OPTIONS = yaml.safe_load((ROOT / "configs" / "serve.yaml").read_text(encoding="utf-8"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
NGINX = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")


def mounts(service):
    """(place on this machine, place in the container, whether it may be written) of each mount."""
    for mount in COMPOSE["services"][service].get("volumes", []):
        mount = re.sub(r"\$\{RUN:.*?\}", "RUN", mount)
        source, target, *mode = mount.split(":")
        yield source, target, mode != ["ro"]


def test_paths_of_the_compose_file_exist_and_only_volumes_are_written():
    wrong = []
    for service in COMPOSE["services"]:
        for source, target, writable in mounts(service):
            if source in COMPOSE["volumes"]:
                continue
            made = source == "RUN" or source.startswith("./secrets/")
            if not made and not (DEPLOY / source).exists():
                wrong.append(f"{service}: {source} does not exist")
            if writable:
                wrong.append(f"{service}: {target} may be written")
    assert not wrong, "\n".join(wrong)


def test_services_have_no_rights_that_they_do_not_need():
    for service in COMPOSE["services"].values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"] and service["mem_limit"]
    users = [service.get("user") for service in COMPOSE["services"].values()]
    users = [user or re.search(r"^USER (\S+)$", DOCKERFILE, re.M)[1] for user in users]
    assert not [user for user in users if user.split(":")[0] in ("0", "root")]
    assert COMPOSE["networks"]["inside"] == {"internal": True}
    assert "ports" not in COMPOSE["services"]["server"], "it is reached through nginx"


def test_ports_and_limits_agree_with_the_options_of_the_server():
    port = OPTIONS["port"]
    assert f"EXPOSE {port}\n" in DOCKERFILE and f'"port={port}"' in DOCKERFILE
    assert f"http://127.0.0.1:{port}/readyz" in DOCKERFILE
    assert COMPOSE["services"]["server"]["expose"] == [str(port)]
    assert f"server server:{port};" in NGINX
    jobs = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text(encoding="utf-8"))[
        "scrape_configs"
    ]
    assert jobs[0]["static_configs"] == [{"targets": [f"server:{port}"]}]
    inner = {mapping.split(":")[1] for mapping in COMPOSE["services"]["proxy"]["ports"]}
    assert inner == set(re.findall(r"listen (\d+)", NGINX))
    assert f"client_max_body_size {OPTIONS['max_body_bytes']};" in NGINX
    assert f"expected at most {OPTIONS['max_body_bytes']} bytes" in NGINX
    retained, answered = (
        float(re.search(rf"{name} (\d+)s;", NGINX)[1])
        for name in ("    keepalive_timeout", "proxy_read_timeout")
    )
    assert retained < 5 <= BoundedProtocol.patience, (
        "the server closes an idle connection after 5 s"
    )
    assert answered > OPTIONS["deadline_ms"] / 1000


def test_the_image_runs_the_command_with_options_that_exist():
    words = json.loads(re.search(r"^CMD (\[.*\])$", DOCKERFILE, re.M)[1])
    options = dict(word.split("=", 1) for word in words)
    assert set(options) <= set(OPTIONS)
    assert json.loads(re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.M)[1]) == [
        "decisionllm",
        "serve",
    ]
    targets = {target for _, target, _ in mounts("server")}
    for name in ("run", "journal", "tokens"):
        path = options[name]
        assert any(path == target or path.startswith(f"{target}/") for target in targets), name
    assert "VOLUME /journal" in DOCKERFILE and "--no-index" in DOCKERFILE


def test_grafana_finds_its_data_source_and_the_dashboard():
    (source,) = yaml.safe_load(
        (DEPLOY / "grafana/datasources/prometheus.yaml").read_text(encoding="utf-8")
    )["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    assert COMPOSE["services"]["prometheus"]["expose"] == ["9090"]
    (provider,) = yaml.safe_load(
        (DEPLOY / "grafana/dashboards/decisionllm.yaml").read_text(encoding="utf-8")
    )["providers"]
    result = {target: source for source, target, _ in mounts("grafana")}
    (dashboard,) = [target for target in result if target.startswith(provider["options"]["path"])]
    loaded = json.loads((DEPLOY / result[dashboard]).read_text(encoding="utf-8"))
    assert loaded["uid"] and loaded["title"] and "__inputs" not in loaded
    (variable,) = loaded["templating"]["list"]
    assert variable["type"] == "datasource" and variable["query"] == source["type"]
    for panel in loaded["panels"]:
        assert panel["datasource"]["uid"] == f"${{{variable['name']}}}"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_secrets_are_made_once_and_the_server_takes_the_tokens(tmp_path):
    def made():
        subprocess.run([DEPLOY / "secrets.sh", "bidder.example", tmp_path / "s"], check=True)
        files = (path for path in (tmp_path / "s").rglob("*") if path.is_file())
        return {str(path.relative_to(tmp_path / "s")): path.read_bytes() for path in files}

    first = made()
    assert made() == first and (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    registered = tokens.Tokens()
    registered.load(first["server/tokens.toml"])
    rights = {
        "bidder.token": {"bid", "read"},
        "operator.token": {"bid", "read", "operate"},
        "prometheus/token": {"read"},
    }
    assert {name: set(registered.find(first[name]).rights) for name in rights} == rights
    mounted = {
        source.removeprefix("./secrets/")
        for service in COMPOSE["services"]
        for source, *_ in mounts(service)
        if source.startswith("./secrets/")
    }
    assert mounted == {name.split("/")[0] for name in first if "/" in name}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool of Prometheus")
def test_prometheus_takes_its_files(tmp_path):
    shutil.copy(DEPLOY / "prometheus.yaml", tmp_path)
    shutil.copy(ROOT / "docs" / "monitoring" / "alerts.yaml", tmp_path)
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "token").write_text("a token", encoding="utf-8")
    command = ["promtool", "check", "config", tmp_path / "prometheus.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
