"""The Dockerfile and the manifests for Kubernetes: their commands, and what they rely on."""

import importlib.metadata
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import draws
import pytest
import yaml
from runs import REPOSITORY

from cairn.config.cli import COMMANDS, load
from cairn.inference.plugin.middleware import OPEN_ROUTES
from cairn.launch.ray.environment import PREFIXES
from cairn.run.directory import RESERVE_SECONDS
from cairn.run.exits import EXIT_STOPPED, EXIT_USAGE
from cairn.watch.page.command import ServeDash

DEPLOY = REPOSITORY / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DOCUMENTS = [(path.name, found) for path in MANIFESTS for found in yaml.safe_load_all(path.read_text())]
JOBS = {name: found for name, found in DOCUMENTS if found["kind"] == "Job"}


def documents(kind: str) -> list[dict[str, Any]]:
    return [found for _, found in DOCUMENTS if found["kind"] == kind]


def pods(found: Any) -> list[dict[str, Any]]:
    """The specifications of pods anywhere in a document."""
    if isinstance(found, list):
        return [pod for part in found for pod in pods(part)]
    if not isinstance(found, dict):
        return []
    return [found] if "containers" in found else [pod for part in found.values() for pod in pods(part)]


PODS = [(name, pod) for name, found in DOCUMENTS for pod in pods(found)]


def command_of(container: dict[str, Any], settings: Path) -> list[str]:
    """The command of Cairn's that a container ends up with, its settings in the folder `settings`."""
    words = list(map(str, container["args"]))
    if "command" in container:  # a script, and the command as its arguments
        script = words.pop(0)
        subprocess.run(["bash", "-n", "-c", script], check=True)
        (end,) = re.findall(r'^exec "\$0" "\$@" (.*)$', script, re.M)
        words += end.replace('"$CLUSTER"', environment(container)["CLUSTER"]).split()
    return [word.replace("/settings", str(settings)) for word in words]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container.get("env", [])}


@pytest.mark.parametrize("name", ["one-node.yaml", "sft.yaml", "rl.yaml", "servers.yaml"])
def test_commands_are_ones_that_there_are(name: str, tmp_path: Path):
    """Every flag is read as the command itself reads it."""
    for file in ("sft.toml", "train.toml", "orch.toml"):
        (tmp_path / file).write_text('[model]\nname = "owner/name"\n' if file != "orch.toml" else "")
    (container,) = [one for found, pod in PODS if found == name for one in pod["containers"]]
    command, *flags = command_of(container, tmp_path)
    config = load(COMMANDS[command], flags)
    if command == "inference":
        assert (config.host, config.port) == ("0.0.0.0", container["ports"][0]["containerPort"])
        probed = {container[kind]["httpGet"]["path"] for kind in ("startupProbe", "readinessProbe")}
        assert probed <= OPEN_ROUTES["GET"], "they are asked without a token"
        return
    assert config.ckpt.resume == "auto"
    trainer = getattr(config, "trainer", config)
    workers = {"one-node.yaml": None}.get(name, gpus_of_cluster())
    assert trainer.workers == workers
    if workers:
        assert trainer.ray.address == f"{documents('RayCluster')[0]['metadata']['name']}-head-svc:6379"


PAGES = ("clusters", "ray", "slurm", "kubernetes", "spot", "network-file-systems")
SAID = "".join((REPOSITORY / "docs" / "how-to" / f"{page}.md").read_text() for page in PAGES)


@pytest.mark.parametrize("line", sorted(set(re.findall(r"^uv run (?:sft|rl) .*$", SAID, re.M))))
def test_commands_of_the_page_are_ones_that_there_are(line: str, tmp_path: Path):
    """As a reader would copy them, with a file of the reader's own."""
    _, _, command, *words = shlex.split(line, comments=True)
    settings = tmp_path / "my.toml"
    settings.write_text('[model]\nname = "owner/name"\n')
    flags = [re.sub(r"^(@?)\w+\.toml$", rf"\1{settings}", word) for word in words]
    load(COMMANDS[command], flags)


def test_files_of_the_page_are_there():
    """Those below deploy/ and tests/; and the maps of settings are named as in the manifests."""
    for name in re.findall(r"(?:deploy|tests)/[\w/.-]+[\w/]", SAID):
        assert (REPOSITORY / name).exists(), name
    made = set(re.findall(r"create configmap ([\w-]+)", SAID))
    mounted = {
        volume["configMap"]["name"]
        for _, pod in PODS
        for volume in pod.get("volumes", [])
        if "configMap" in volume
    }
    assert made == mounted


def gpus_of_cluster() -> int:
    """All GPUs of the Ray cluster, which Ray is told of as Kubernetes is."""
    (cluster,) = documents("RayCluster")
    count = 0
    for group in cluster["spec"]["workerGroupSpecs"]:
        gpus = int(group["rayStartParams"]["num-gpus"])
        assert gpus == group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        count += gpus * group["replicas"]
    return count


def test_servers_are_where_rl_looks_for_them(tmp_path: Path):
    """By the names that a StatefulSet gives; both have the same model."""
    (servers,) = documents("StatefulSet")
    name, service = servers["metadata"]["name"], servers["spec"]["serviceName"]
    assert service in {found["metadata"]["name"] for found in documents("Service")}
    urls = [f"http://{name}-{number}.{service}:8000" for number in range(servers["spec"]["replicas"])]
    words = list(map(str, JOBS["rl.yaml"]["spec"]["template"]["spec"]["containers"][0]["args"]))
    first = words.index("--orchestrator.inference-url") + 1
    assert words[first : first + len(urls)] == urls
    (model,) = [word for word in words if word.startswith("--model.name")]
    container = servers["spec"]["template"]["spec"]["containers"][0]
    assert model in container["args"]
    config = load(COMMANDS["inference"], container["args"][1:])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == (config.tensor_parallel or 1)


@pytest.mark.parametrize("name", sorted(JOBS))
def test_pods_that_end_are_run_again_by_their_exit_code(name: str):
    """75: again, however often; bad usage: never; and the run knows when Kubernetes would kill it."""
    spec = JOBS[name]["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    actions = {
        code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert actions == {EXIT_USAGE: "FailJob", EXIT_STOPPED: "Ignore"}
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    assert {"action": "Ignore", "onPodConditions": [disrupted]} in rules
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy needs it"
    (flag,) = [word for word in pod["containers"][0]["args"] if "preemption.seconds" in word]
    assert float(flag.partition("=")[2]) + RESERVE_SECONDS <= pod["terminationGracePeriodSeconds"]


def test_volumes_and_tokens_are_those_that_are_made():
    """Names that are used are declared, or made by a command in a comment."""
    said = "\n".join(path.read_text() for path in MANIFESTS)
    claims = {found["metadata"]["name"] for found in documents("PersistentVolumeClaim")}
    for name, pod in PODS:
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for volume in pod.get("volumes", []):
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "cairn-runs") in claims
        for container in pod["containers"]:
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted <= volumes, name
            for one in container.get("env", []):
                if secret := one.get("valueFrom", {}).get("secretKeyRef"):
                    assert f"create secret generic {secret['name']} " in said
                    assert f"--from-literal={secret['key']}=" in said


def test_kuberays_own_probes_are_replaced():
    """They ask the dashboard, which Cairn's packages do not have."""
    (cluster,) = documents("RayCluster")
    for pod in pods(cluster):
        for container in pod["containers"]:
            assert {"readinessProbe", "livenessProbe"} <= container.keys()
    assert cluster["spec"]["rayVersion"] == importlib.metadata.version("ray")


@draws.seldom
def test_ray_knows_the_flags():
    """Those that KubeRay makes of rayStartParams, and those of the launcher's pod."""
    ray = Path(sys.executable).with_name("ray")
    told = subprocess.run([ray, "start", "--help"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"--[a-z-]+", told))
    (cluster,) = documents("RayCluster")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    flags = {f"--{name}" for group in groups for name in group["rayStartParams"]}
    for name in ("sft.yaml", "rl.yaml"):
        script = JOBS[name]["spec"]["template"]["spec"]["containers"][0]["args"][0]
        flags |= set(re.findall(r"(--[a-z-]+)", script.partition("exec")[0]))
    assert len(flags) > 4
    assert flags <= known


RDMA = [
    (path.name, found)
    for path in MANIFESTS
    if "#rdma " in path.read_text()
    for found in yaml.safe_load_all(path.read_text().replace("#rdma ", ""))
]
"""What the manifests are once the marks are gone, as their comment says."""


@pytest.mark.parametrize("documents", [DOCUMENTS, RDMA], ids=["as they are", "with RDMA"])
def test_manifests_are_valid(documents: list[tuple[str, Any]]):
    """By Kubernetes' own schemas; of KubeRay's resources, the pods."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for _, found in documents:
        if not found["apiVersion"].startswith("ray.io"):
            validate.validate(found, "1.31", strict=True)
    for pod in (pod for _, found in documents for pod in pods(found)):
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod}
        validate.validate(whole, "1.31", strict=True)


def test_ranks_get_rdma_devices_and_the_interface():
    """Without the marks: the pods of ranks have devices, and the command's pods name what reaches ranks."""
    assert "s/#rdma //" in (DEPLOY / "kubernetes" / "ray.yaml").read_text()
    (cluster,) = [found for _, found in RDMA if found["kind"] == "RayCluster"]
    for group in cluster["spec"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        limits = container["resources"]["limits"]
        assert limits.keys() == {"nvidia.com/gpu", "memory", "rdma/hca_shared_devices_a"}
    jobs = {name: found for name, found in RDMA if found["kind"] == "Job"}
    assert jobs.keys() == {"sft.yaml", "rl.yaml"}
    for found in jobs.values():
        (container,) = pods(found)[0]["containers"]
        told = {name for name, value in environment(container).items() if value == "eth0"}
        assert told == {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
        assert all(name.startswith(PREFIXES) for name in told), "they are handed to the ranks"


SERVICES = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


def test_composed_commands_are_ones_that_there_are(monkeypatch: pytest.MonkeyPatch):
    """The run asks the server that is there, both see the same files, and the page shows its folder."""
    monkeypatch.chdir(REPOSITORY)
    (server, run, page) = (SERVICES[name]["command"] for name in ("server", "run", "page"))
    serves = load(COMMANDS[server[0]], server[1:])
    assert (serves.host, serves.port) == ("127.0.0.1", 8000)
    assert f"http://{serves.host}:{serves.port}/health" in SERVICES["server"]["healthcheck"]["test"][-1]
    assert "/health" in OPEN_ROUTES["GET"], "it is asked without a token"
    config = load(COMMANDS[run[0]], run[1:])
    assert config.orchestrator.inference_url == [f"http://{serves.host}:{serves.port}"]
    assert config.ckpt.resume == "auto"
    assert SERVICES["run"]["stop_grace_period"] == "2m"
    assert config.preemption.seconds + RESERVE_SECONDS < 120
    folder = load(ServeDash, page[1:]).folder
    assert Path(config.output_dir).is_relative_to(folder)
    for service in SERVICES.values():
        assert service["network_mode"] == "host", "nothing listens on other addresses than 127.0.0.1"
        assert service["volumes"] == [f"../runs:{folder}"]
        assert service["build"]["dockerfile"] == "deploy/Dockerfile"


def test_composed_services_on_gpus_are_the_same():
    """The second file only adds GPUs, and says which of them the server has."""
    gpus = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]
    assert gpus.keys() == {"server", "run"}
    command = gpus["server"]["command"]
    assert command[:3] == SERVICES["server"]["command"]
    assert load(COMMANDS["inference"], command[1:]).gpus == "0,"
    for service in gpus.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]


def test_the_image_is_made_of_what_there_is():
    """The files that are copied exist and the build sees them; uv is the version that made the lock files."""
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]]
    assert {"requirements.lock", "requirements-gpu.lock", "src", "pyproject.toml"} <= set(copied)
    seen = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for name in copied:
        assert (REPOSITORY / name).exists(), name
        assert f"!{name}" in seen
    needed = re.findall(
        r'^readme = "(.*)"|^license-files = \["(.*)"\]', (REPOSITORY / "pyproject.toml").read_text(), re.M
    )
    assert {name for pair in needed for name in pair if name} <= set(copied)
    bootstrap = (REPOSITORY / "scripts" / "bootstrap.py").read_text()
    (uv,) = re.findall(r'^UV = "(.*)"$', bootstrap, re.M)
    assert f" {uv} " in text
