"""The chart from one revision to the next: what an upgrade must not restart, and what it takes over from the cluster."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.deploy.chart import CHART, EXAMPLES, Rendered, content, helm
from tests.deploy.cluster import Cluster, cluster
from tests.deploy.local import engine, here, mounted
from tests.support.process import gateway, wait_for

ENGINE = {"model": {"id": "org/model"}}
SCALED = {"enabled": True, "minReplicas": 2, "maxReplicas": 8}


@pytest.fixture
def api() -> Iterator[Cluster]:
    with cluster() as server:
        yield server


def templates(rendered: Rendered) -> dict[str, str]:
    """The pods' template of every workload by its component."""
    return {component: json.dumps(each["spec"]["template"]) for component, each in rendered.workloads().items()}


def later_chart(folder: Path) -> Path:
    """The chart with the next version and the next version of the gateway."""
    chart = folder / "vllm-gateway"
    shutil.copytree(CHART, chart)
    file = chart / "Chart.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"version": "0.9.0", "appVersion": "0.9.0"}))
    return chart


def rendered_by(chart: Path, *files: Path, values: dict[str, Any] | None = None) -> Rendered:
    arguments = [argument for file in files for argument in ("--values", file)]
    apis = [argument for api in ("monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1") for argument in ("--api-versions", api)]
    done = helm("template", "gw", chart, "--namespace", "llm", *apis, *arguments, values=values or {})
    assert done.returncode == 0, done.stderr
    return Rendered(tuple(each for each in yaml.safe_load_all(done.stdout) if each))


# Engines that are not restarted


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_another_version_of_the_chart_and_the_gateway_restarts_no_engine(example: Path, tmp_path: Path) -> None:
    before, after = templates(rendered_by(CHART, example)), templates(rendered_by(later_chart(tmp_path), example))
    assert before.pop("gateway") != after.pop("gateway"), "its image is another one"
    assert before == after and (before or example.stem == "external-servers")


def test_another_image_of_the_gateway_restarts_no_engine() -> None:
    values = {"engines": {"a": ENGINE, "b": ENGINE}, "engineDefaults": {"podLabels": {"tier": "gpu"}}}
    before, after = (templates(Rendered.of(values=values | {"image": {"tag": tag}})) for tag in ("1", "2"))
    assert before.pop("gateway") != after.pop("gateway")
    assert before == after and before.keys() == {"engine-a", "engine-b"}


def test_labels_for_every_object_restart_no_pod() -> None:
    values: dict[str, Any] = {"engines": {"a": ENGINE}}
    plain, labeled = Rendered.of(values=values), Rendered.of(values=values | {"commonLabels": {"team": "ml"}})
    assert templates(plain) == templates(labeled)
    assert {each["metadata"]["labels"].get("team") for each in labeled.manifests} == {"ml"}


def test_pods_have_the_labels_that_are_selected_by_and_the_operators() -> None:
    rendered = Rendered.of(values={"engines": {"a": ENGINE | {"podLabels": {"tier": "gpu"}}}, "podLabels": {"tier": "edge"}})
    for component, tier in (("gateway", "edge"), ("engine-a", "gpu")):
        workload = rendered.workload(component)
        assert workload["spec"]["template"]["metadata"]["labels"] == workload["spec"]["selector"]["matchLabels"] | {"tier": tier}


def test_immutable_fields_stay_from_version_to_version(tmp_path: Path) -> None:
    """Selectors of every workload; of a StatefulSet, the templates of its volumes too."""
    values: dict[str, Any] = {"engines": {"a": ENGINE}, "persistence": {"enabled": True}}
    before = rendered_by(CHART, values=values)
    after = rendered_by(later_chart(tmp_path), values=values | {"commonLabels": {"team": "ml"}})
    for component, workload in before.workloads().items():
        former, later = workload["spec"], after.workload(component)["spec"]
        for name in ("selector", "volumeClaimTemplates", "serviceName", "podManagementPolicy"):
            assert former.get(name) == later.get(name), (component, name)


def test_a_setting_that_a_running_gateway_takes_over_restarts_no_pod() -> None:
    values: dict[str, Any] = {"engines": {"a": ENGINE}}
    before, after = (templates(Rendered.of(values=values | {"config": {"server": {"body_limit": size}}})) for size in ("20MiB", "40MiB"))
    assert before == after


# Replicas of what is scaled


def test_without_a_cluster_what_is_scaled_begins_with_its_least_number() -> None:
    engine = ENGINE | {"autoscaling": {"enabled": True, "minReplicas": 3}, "replicas": 7}
    nothing = ENGINE | {"autoscaling": {"enabled": True, "minReplicas": 0}}
    rendered = Rendered.of(values={"engines": {"a": engine, "b": nothing, "c": ENGINE}, "autoscaling": SCALED, "replicas": 9})
    replicas = {component: each["spec"]["replicas"] for component, each in rendered.workloads().items()}
    assert replicas == {"gateway": 2, "engine-a": 3, "engine-b": 0, "engine-c": 1}


@pytest.mark.parametrize("persistence", [False, True])
def test_turning_autoscaling_on_keeps_the_pods_that_run(api: Cluster, tmp_path: Path, persistence: bool) -> None:
    values: dict[str, Any] = {"persistence": {"enabled": persistence}}
    api.upgrade(tmp_path, values | {"engines": {"a": ENGINE | {"replicas": 5}}, "replicas": 4})
    scaled = values | {"engines": {"a": ENGINE | {"autoscaling": {"enabled": True, "minReplicas": 1}}}, "autoscaling": SCALED}
    rendered = api.upgrade(tmp_path, scaled)
    assert {component: each["spec"]["replicas"] for component, each in rendered.workloads().items()} == {"gateway": 4, "engine-a": 5}
    running = rendered.workload("engine-a")
    api.store(running | {"spec": running["spec"] | {"replicas": 7}})
    assert api.upgrade(tmp_path, scaled).workload("engine-a")["spec"]["replicas"] == 7, "what the autoscaler has set stays"
    api.store(running | {"spec": running["spec"] | {"replicas": 0}})
    assert api.upgrade(tmp_path, scaled).workload("engine-a")["spec"]["replicas"] == 1, "at 0 a HorizontalPodAutoscaler does nothing"


# Keys that the chart makes


def engine_keys(rendered: Rendered) -> tuple[str, list[str]]:
    """The key that the gateway sends, and those that the engines accept."""
    secret = content(rendered.one("Secret", "gw-vllm-gateway-engine-key"))
    return secret["key"], yaml.safe_load(secret["vllm.yaml"])["api-key"]


def test_the_engines_key_is_replaced_by_a_key_that_running_engines_accept(api: Cluster, tmp_path: Path) -> None:
    values: dict[str, Any] = {"engines": {"a": ENGINE}}
    key, accepted = engine_keys(first := api.upgrade(tmp_path, values))
    assert accepted[0] == key and len({*accepted}) == 2
    assert engine_keys(api.upgrade(tmp_path, values)) == (key, accepted), "an upgrade keeps the keys"
    replaced = values | {"engineKey": {"generation": 2}}
    later, accepted_later = engine_keys(second := api.upgrade(tmp_path, replaced))
    assert later == accepted[1], "engines that run accept it"
    assert accepted_later[0] == later and key not in accepted_later, "engines that start accept the former one no longer"
    assert templates(first) == templates(second), "no pod is restarted"
    assert engine_keys(api.upgrade(tmp_path, replaced)) == engine_keys(second)
    assert engine_keys(api.upgrade(tmp_path, values)) == engine_keys(second), "a generation that is lower changes nothing"


def test_requests_are_served_while_the_engines_key_is_replaced(api: Cluster, tmp_path: Path) -> None:
    """An engine that runs with the Secret of before, and a gateway that reads the Secret of each revision."""
    values: dict[str, Any] = {"engines": {"a": ENGINE}, "rbac": {"create": False}}
    first, root = api.upgrade(tmp_path, values), tmp_path / "root"
    token = content(first.one("Secret", "gw-vllm-gateway-keys"))["key"]
    chat: dict[str, Any] = {"model": "org/model", "messages": [{"role": "user", "content": "Hello"}]}

    def status() -> int:
        headers = {"authorization": f"Bearer {token}"}
        return httpx2.post(f"{one.url}/v1/chat/completions", json=chat, headers=headers, timeout=60).status_code

    def revision(number: int) -> None:
        rendered = api.upgrade(tmp_path, values | {"engineKey": {"generation": number}})
        (root / "etc/vllm-gateway/engine/key").write_text(engine_keys(rendered)[0])
        assert one.command("reload").returncode == 0

    mounted(first, root)
    with engine(first, "engine-a", root) as port, gateway(here(root, {"org/model": port}), None) as one:
        wait_for(lambda: status() == 200)
        revision(2)
        assert status() == 200
        revision(3)  # the engine has not been restarted, so it does not know this one
        wait_for(lambda: status() == 503)


def test_a_key_of_the_chart_before_stays_and_gets_a_successor(api: Cluster, tmp_path: Path) -> None:
    """Until 0.1 the Secret had one entry."""
    values: dict[str, Any] = {"engines": {"a": ENGINE}}
    metadata = {"name": "gw-vllm-gateway-engine-key", "namespace": "llm", "labels": {"app.kubernetes.io/managed-by": "Helm"}}
    api.store({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"key": "former"}})
    refused = api.render(tmp_path, values | {"engineKey": {"generation": 2}})
    assert refused.returncode != 0 and "the engines do not accept a next key yet" in refused.stderr
    key, accepted = engine_keys(api.upgrade(tmp_path, values))
    assert key == accepted[0] == "former" and len({*accepted}) == 2


def test_what_the_chart_made_stays_over_upgrades(api: Cluster, tmp_path: Path) -> None:
    values: dict[str, Any] = {"engines": {"a": ENGINE}}
    first, second = (api.upgrade(tmp_path, values) for _ in range(2))
    made = {each["metadata"]["name"]: content(each) for each in first.all("Secret")}
    assert made.keys() == {f"gw-vllm-gateway-{name}" for name in ("keys", "engine-key", "admin-token")}
    assert {each["metadata"]["name"]: content(each) for each in second.all("Secret")} == made


# Volumes


def test_a_gateway_with_volumes_is_a_statefulset_that_keeps_its_ledger_there() -> None:
    config = {"ledger": "sqlite:////var/lib/vllm-gateway/usage.db"}
    values: dict[str, Any] = {"engines": {"a": ENGINE}, "persistence": {"enabled": True, "size": "5Gi"}, "config": config}
    rendered, plain = Rendered.of(values=values), Rendered.of(values=values | {"persistence": {"enabled": False}})
    workload, container = rendered.workload(), rendered.container()
    assert (workload["kind"], plain.workload()["kind"]) == ("StatefulSet", "Deployment")
    assert workload["spec"]["selector"] == plain.workload()["spec"]["selector"]
    (claim,) = workload["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"] == {"storage": "5Gi"}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts[claim["metadata"]["name"]] == "/var/lib/vllm-gateway"
    assert {"name": "XDG_STATE_HOME", "value": "/var/lib"} in container["env"]
    headless = rendered.one("Service", workload["spec"]["serviceName"])["spec"]
    assert headless["clusterIP"] == "None" and headless["selector"] == workload["spec"]["selector"]["matchLabels"]
    assert plain.container()["volumeMounts"] == container["volumeMounts"], "the same paths in both"
    (state,) = [each for each in plain.pod()["volumes"] if each["name"] == "state"]
    assert state["emptyDir"] == {"sizeLimit": "1Gi"}


def test_a_volume_for_one_pod_can_be_released_before_the_next_pod_starts() -> None:
    claim = {"name": "ledger", "persistentVolumeClaim": {"claimName": "ledger"}}
    rendered = Rendered.of(values={"engines": {"a": ENGINE}, "extraVolumes": [claim], "strategy": {"type": "Recreate"}, "replicas": 1})
    assert rendered.workload()["spec"]["strategy"] == {"type": "Recreate"}
