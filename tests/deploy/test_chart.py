"""The chart: its manifests pass Kubernetes' schemas and the gateway's checks, and it runs.

No pod is scheduled here: what the containers would run is taken out of the rendered manifests and run on this machine, with the paths
and ports that it has here.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from gateway.auth.keys import hash_of
from gateway.config import load
from gateway.config.diff import NEEDS_RESTART
from gateway.snapshot.snapshot import Model
from gateway.telemetry.metrics import FAMILIES, PREFIX
from tests.deploy.chart import CHART, EXAMPLES, Rendered, content, helm, judged, template
from tests.deploy.local import engine, here, mounted
from tests.documents.blocks import blocks
from tests.support.process import gateway, wait_for, write
from tests.support.running import KEY
from upstream.balancing.moves import SPREAD
from upstream.http.address import Address
from upstream.vllm.command_line import Adapter, LaunchSettings, command_line

_RIGHTS = ("Role", "RoleBinding")
ENGINE = {"model": {"id": "org/model"}}
EVERYTHING = {"enabled": True}
VALUES: dict[str, dict[str, Any]] = {
    "dns": {"engines": {"a": ENGINE}, "rbac": {"create": False}},
    "kubernetes with foreign rights": {"engines": {"a": ENGINE}, "rbac": {"create": False}, "discovery": "kubernetes"},
    "no key of the engines": {"engines": {"a": ENGINE}, "engineKey": {"enabled": False}},
    "a CPU and no volume": {"engines": {"a": ENGINE | {"gpus": 0, "cache": {"enabled": False}}}},
    "scaled to nothing": {"engines": {"a": ENGINE | {"autoscaling": EVERYTHING | {"minReplicas": 0}}}},
    "keys in the configuration": {
        "keys": {"enabled": False},
        "config": {"keys": [{"id": "anonymous", "anonymous": True}], "models": [{"id": "m", "servers": [{"url": "http://10.0.0.1:8000"}]}]},
    },
    "names and images": {
        "engines": {"a": ENGINE},
        "fullnameOverride": "front",
        "commonLabels": {"team": "ml"},
        "image": {"repository": "registry.example.com/gateway", "digest": "sha256:" + "0" * 64},
        "imagePullSecrets": [{"name": "pull"}],
        "serviceAccount": {"create": False, "name": "mine"},
        "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"a": "b"}},
    },
    "places": {
        "engines": {"a": ENGINE | {"nodeSelector": {"gpu": "h100"}, "affinity": {"nodeAffinity": {}}, "priorityClassName": "high"}},
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "affinity": {"podAffinity": {}},
        "priorityClassName": "high",
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"a": "b"}}}
        ],
        "terminationGracePeriodSeconds": 900,
    },
    "extras": {
        "engines": {"a": ENGINE | {"extraEnv": [{"name": "A", "value": "b"}], "podLabels": {"a": "b"}, "podAnnotations": {"a": "b"}}},
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}, "data": {"a": "b"}},
            "{apiVersion: v1, kind: ConfigMap, metadata: {name: as-text}, data: {port: {{ .Values.service.port | quote }}}}",
        ],
        "tests": {"enabled": False},
        "podLabels": {"a": "b"},
        "podAnnotations": {"a": "b"},
    },
    "a volume for each pod": {
        "engines": {"a": ENGINE},
        "persistence": EVERYTHING | {"storageClass": "fast", "updateStrategy": {"type": "OnDelete"}},
        "config": {"ledger": "sqlite:////var/lib/vllm-gateway/usage.db"},
        "autoscaling": EVERYTHING,
    },
    "IPv6": {
        "engines": {"a": ENGINE | {"host": "::"}},
        "config": {"server": {"host": "::", "admin": {"host": "::"}}},
        "httpRoute": EVERYTHING | {"parentRefs": [{"name": "public"}], "timeout": ""},
    },
    "foreign keys of the engines": {
        "engines": {"a": ENGINE},
        "engineKey": {"existingSecret": "engine-key", "accepted": "engines.yaml"},
        "adminToken": {"existingSecret": "admin", "key": "bearer"},
        "strategy": {"type": "Recreate"},
    },
    "no token of the admin port": {"engines": {"a": ENGINE}, "adminToken": {"enabled": False}},
    "everything that may be on": {
        "engines": {"a": ENGINE | {"autoscaling": EVERYTHING, "podDisruptionBudget": EVERYTHING}, "b": {"model": {"id": "org/other"}}},
        "autoscaling": EVERYTHING,
        "ingress": EVERYTHING | {"hosts": ["llm.example.com"], "tls": [{"secretName": "tls", "hosts": ["llm.example.com"]}]},
        "httpRoute": EVERYTHING | {"parentRefs": [{"name": "public"}], "annotations": {"a": "b"}},
        "networkPolicy": EVERYTHING | {"clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "egress": [{"ports": [{"port": 443}]}]},
        "monitoring": {
            "serviceMonitor": EVERYTHING | {"tokenSecret": "token", "labels": {"a": "b"}},
            "prometheusRule": EVERYTHING,
            "dashboards": EVERYTHING | {"annotations": {"folder": "LLM"}},
        },
    },
}
"""Combinations beside the examples."""


@pytest.fixture(scope="module")
def cases() -> dict[str, Rendered]:
    examples = {file.stem: Rendered.of(file) for file in EXAMPLES}
    return examples | shown() | {name: Rendered.of(values=values) for name, values in VALUES.items()}


def shown() -> dict[str, Rendered]:
    """Return the values that the documents show."""
    return {block.file: Rendered.of(values=yaml.safe_load(block.text)) for block in blocks("yaml") if block.file.startswith("values")}


@pytest.fixture(scope="module")
def two_models(cases: dict[str, Rendered]) -> Rendered:
    return cases["two-models"]


# The chart's own files


def test_what_is_made_from_elsewhere_is_as_it_would_be_made_now() -> None:
    made: dict[Path, str] = runpy.run_path(str(CHART.parent / "sync.py"))["contents"]()
    assert {path.name for path, text in made.items() if path.read_text() != text} == set(), "run python deploy/helm/sync.py"
    assert {path for path in (CHART / "files").rglob("*") if path.is_file()} <= made.keys()


def test_the_version_is_the_gateways() -> None:
    from gateway import __version__

    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_helm_finds_nothing_wrong_with_an_example(example: Path) -> None:
    done = helm("lint", "--strict", CHART, "--values", example)
    assert done.returncode == 0 and "[WARNING]" not in done.stdout, done.stdout + done.stderr


def test_it_can_be_packaged(tmp_path: Path) -> None:
    done = helm("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    rendered = helm("template", "gw", next(tmp_path.glob("*.tgz")), "--values", EXAMPLES[0])
    assert rendered.returncode == 0, rendered.stderr


# Rendering


def wrong(right: Rendered) -> dict[str, Rendered]:
    """One object each, with something in it that must not be there."""
    firsts = [right.all(kind)[0] for kind in ("Deployment", "HTTPRoute", "ServiceMonitor", "PrometheusRule")]
    misspelt = {f"misspelt {each['kind']}": Rendered((each | {"spec": each["spec"] | {"speling": 1}},)) for each in firsts}
    gone = {"apiVersion": "policy/v1beta1", "kind": "PodDisruptionBudget", "metadata": {"name": "x"}, "spec": {}}
    return misspelt | {"an API that is gone": Rendered((gone,))}


def test_the_manifests_are_as_kubernetes_and_the_operators_have_them(cases: dict[str, Rendered], two_models: Rendered) -> None:
    faults = wrong(two_models)
    found = judged(cases | faults)
    assert {name: found[name] for name in cases if found[name]} == {}
    assert [name for name in faults if not found[name]] == []


def test_the_gateway_accepts_every_configuration(cases: dict[str, Rendered], tmp_path: Path) -> None:
    environ = {"LLAMA_KEY": "k", "LIMITS_STORE": "redis://redis:6379/0", "LEDGER": "postgresql://ledger@db/usage"}
    for name, rendered in cases.items():
        root = tmp_path / name
        mounted(rendered, root)
        config = load(root / "etc/vllm-gateway/config/gateway.yaml", environ)
        assert config.models and config.keys, name


def test_engines_start_as_the_gateway_would_start_them() -> None:
    args: dict[str, Any] = {
        "max_model_len": 1000000,
        "enable-auto-tool-choice": True,
        "enable-prefix-caching": False,
        "allowed-origins": ["https://a.example", "b"],
        "override-generation-config": {"temperature": 0.5, "stop": ["<|end|>"]},
        "compilation-config.cudagraph_mode": "NONE",
        "gpu-memory-utilization": 0.9,
        "chat-template": "-{{ 'braces' }} & \"quotes\"",
    }
    loras = [{"id": f"lora-{n}", "path": f"/adapters/{n}"} for n in range(2)]
    model = {"id": "org/model", "loras": loras}
    values = {"engines": {"a": {"model": model, "args": args, "weights": "/weights", "port": 9001, "drain": "2m"}}}
    rendered = Rendered.of(values=values | {"engineKey": {"existingSecret": "engine-key"}})
    adapters = tuple(Adapter(each["id"], each["path"]) for each in loras)
    settings = LaunchSettings("/weights", ("org/model",), args=args, adapters=adapters, drain=120)
    expected = command_line(settings, Address(host="0.0.0.0", port=9001), "key")
    container = rendered.container("engine-a")
    assert options([*container["command"], *container["args"]]) == options([*expected.argv])
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert expected.env.items() - {("VLLM_API_KEY", "key")} <= variables.items() and "VLLM_API_KEY" in variables


def test_engines_of_several_servers_have_the_routes_that_continue_chats() -> None:
    engines: dict[str, tuple[dict[str, Any], list[str]]] = {
        "two": ({"replicas": 2}, ["--enable-scale-out"]),
        "scaled": ({"replicas": 1, "autoscaling": {"enabled": True}}, ["--enable-scale-out"]),
        "one": ({"replicas": 1}, []),
        "off": ({"replicas": 2, "model": {"id": "off", "resume": False}}, []),
        "refused": ({"replicas": 2, "args": {"enable_scale_out": False}}, ["--no-enable-scale-out"]),
        "pooling": ({"replicas": 2, "args": {"runner": "pooling"}}, []),
        "embeddings": ({"replicas": 2, "args": {"convert": "embed"}}, []),
    }
    rendered = Rendered.of(values={"engines": {name: {**ENGINE, "model": {"id": name}, **each} for name, (each, _) in engines.items()}})
    found = {name: [arg for arg in rendered.container(f"engine-{name}")["args"] if "scale-out" in arg] for name in engines}
    assert found == {name: flags for name, (_, flags) in engines.items()}


def test_no_key_of_the_engines_is_on_a_command_line_or_in_a_variable(cases: dict[str, Rendered]) -> None:
    """Engines that accept two keys read them from a file, as their configuration file."""
    rendered = cases["one-gpu"]
    keys = {text for name, text in content(rendered.one("Secret", "gw-vllm-gateway-engine-key")).items() if name != "vllm.yaml"}
    assert len(keys) == 2
    (container,) = rendered.pod("engine-qwen")["containers"]
    assert not [key for key in keys if key in json.dumps(container)]
    assert "VLLM_API_KEY" not in {each["name"] for each in container["env"]}
    assert container["args"][container["args"].index("--config") + 1] == "/etc/vllm-gateway/engine/vllm.yaml"


def test_engines_that_accept_one_key_have_it_in_a_variable() -> None:
    container = Rendered.of(values={"engines": {"a": ENGINE}, "engineKey": {"existingSecret": "mine"}}).container("engine-a")
    (variable,) = [each for each in container["env"] if each["name"] == "VLLM_API_KEY"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "mine", "key": "key"}} and "--config" not in container["args"]


def test_engines_listen_on_the_address_that_is_named(cases: dict[str, Rendered]) -> None:
    for name, host in (("one-gpu", "0.0.0.0"), ("IPv6", "::")):
        args = next(each for part, each in cases[name].workloads().items() if part != "gateway")["spec"]["template"]["spec"]["containers"][
            0
        ]["args"]
        assert args[args.index("--host") + 1] == host


def test_the_admin_port_requires_a_token(cases: dict[str, Rendered]) -> None:
    made = cases["two-models"]
    assert made.config["server"]["admin"]["token"] == {"file": "/etc/vllm-gateway/admin/token"}
    assert len(content(made.one("Secret", "gw-vllm-gateway-admin-token"))["token"]) == 48
    foreign = cases["foreign keys of the engines"]
    assert [each["secret"] for each in foreign.pod()["volumes"] if each["name"] == "admin-token"] == [
        {"secretName": "admin", "items": [{"key": "bearer", "path": "token"}]}
    ]
    assert "token" not in cases["no token of the admin port"].config["server"]["admin"]


def test_a_token_that_the_operator_sets_is_the_admin_ports() -> None:
    own = {"server": {"admin": {"token": {"env": "ADMIN"}}}}
    rendered = Rendered.of(values={"engines": {"a": ENGINE}, "config": own, "monitoring": {"serviceMonitor": EVERYTHING}})
    assert rendered.config["server"]["admin"]["token"] == {"env": "ADMIN"}
    assert not [each for each in rendered.all("Secret") if each["metadata"]["name"].endswith("admin-token")]
    assert monitors_token(rendered) == rendered.config["server"]["admin"]["tokens"][0]["hash"]


def monitors_token(rendered: Rendered) -> str:
    """Return the hash of the token that the ServiceMonitor sends."""
    credentials = rendered.one("ServiceMonitor")["spec"]["endpoints"][0]["authorization"]["credentials"]
    assert credentials == {"name": "gw-vllm-gateway-metrics-token", "key": "token"}
    return hash_of(content(rendered.one("Secret", credentials["name"]))[credentials["key"]])


def test_prometheus_has_its_own_token_that_may_only_read(cases: dict[str, Rendered]) -> None:
    made = cases["two-models"]
    (token,) = made.config["server"]["admin"]["tokens"]
    assert token == {"name": "service-monitor", "hash": monitors_token(made), "role": "viewer"}
    own = {"name": "mine", "hash": hash_of("mine"), "role": "operator"}
    config = {"server": {"admin": {"tokens": [own]}}}
    more = Rendered.of(values={"engines": {"a": ENGINE}, "config": config, "monitoring": {"serviceMonitor": EVERYTHING}})
    assert [each["name"] for each in more.config["server"]["admin"]["tokens"]] == ["mine", "service-monitor"]
    named = cases["everything that may be on"]
    assert "tokens" not in named.config["server"]["admin"], "the operator has named a Secret, and adds its hash"
    credentials = named.one("ServiceMonitor")["spec"]["endpoints"][0]["authorization"]["credentials"]
    assert credentials == {"name": "token", "key": "token"}


def test_an_open_admin_port_stays_open_for_prometheus() -> None:
    values = {"engines": {"a": ENGINE}, "adminToken": {"enabled": False}, "monitoring": {"serviceMonitor": EVERYTHING}}
    rendered = Rendered.of(values=values)
    assert "authorization" not in rendered.one("ServiceMonitor")["spec"]["endpoints"][0]
    assert rendered.config["server"]["admin"].keys().isdisjoint({"token", "tokens"})


def test_prometheus_uses_the_tls_of_the_admin_port() -> None:
    tls = {"serverName": "gateway.llm.svc", "ca": {"secret": {"name": "admin-tls", "key": "ca.crt"}}}
    config = {"server": {"admin": {"tls": {"cert": "/tls/tls.crt", "key": "/tls/tls.key"}}}}
    values = {"engines": {"a": ENGINE}, "config": config, "monitoring": {"serviceMonitor": EVERYTHING}}
    refused = template(values=values)
    assert refused.returncode != 0 and "monitoring.serviceMonitor.tlsConfig" in refused.stderr, "a token needs a server that is verified"
    values["monitoring"] = {"serviceMonitor": EVERYTHING | {"tlsConfig": tls}}
    rendered = Rendered.of(values=values)
    endpoint = rendered.one("ServiceMonitor")["spec"]["endpoints"][0]
    assert (endpoint["scheme"], endpoint["tlsConfig"], endpoint["port"]) == ("https", tls, "admin")
    assert monitors_token(rendered) == rendered.config["server"]["admin"]["tokens"][0]["hash"]
    assert rendered.container()["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"


def test_a_model_that_may_be_scaled_to_zero_does_not_alert_without_servers() -> None:
    to_zero = {"model": {"id": "org/some.model"}, "autoscaling": EVERYTHING | {"minReplicas": 0}}
    made = Rendered.of(values={"engines": {"a": ENGINE, "b": to_zero}, "monitoring": {"prometheusRule": EVERYTHING}})
    (expression,) = [
        rule["expr"]
        for group in made.one("PrometheusRule")["spec"]["groups"]
        for rule in group["rules"]
        if rule.get("alert") == "VllmGatewayNoHealthyServer"
    ]
    assert expression.startswith(r'max by (namespace, release, model) (vllm_gateway_ready_servers{model!~"org/some\\.model"}) == 0')
    plain = Rendered.of(values={"engines": {"a": ENGINE}, "monitoring": {"prometheusRule": EVERYTHING}})
    assert plain.one("PrometheusRule")["spec"] == yaml.safe_load((CHART.parents[1] / "prometheus" / "rules.yaml").read_text())


def test_several_servers_have_a_budget_and_engines_request_what_they_need() -> None:
    scaled = ENGINE | {"autoscaling": EVERYTHING}
    rendered = Rendered.of(values={"engines": {"a": ENGINE, "b": ENGINE | {"replicas": 2}, "c": scaled}})
    budgets = {each["metadata"]["name"] for each in rendered.all("PodDisruptionBudget")}
    assert budgets == {"gw-vllm-gateway", "gw-vllm-gateway-b", "gw-vllm-gateway-c"}
    assert rendered.container("engine-a")["resources"] == {
        "requests": {"cpu": "2", "memory": "16Gi"},
        "limits": {"nvidia.com/gpu": 1},
    }


def test_the_pod_of_helm_test_may_reach_a_gateway_that_names_its_clients(cases: dict[str, Rendered]) -> None:
    rendered = cases["everything that may be on"]
    peers = rendered.one("NetworkPolicy")["spec"]["ingress"][0]["from"]
    labels = rendered.one("Pod", "gw-vllm-gateway-test")["metadata"]["labels"]
    (selected,) = [each["podSelector"]["matchLabels"] for each in peers if "podSelector" in each]
    assert selected.items() <= labels.items()


def options(argv: list[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """The words before the flags, and each flag's words; JSON is compared by its value."""
    found: dict[str, list[Any]] = {}
    before: list[str] = []
    for argument in argv:
        if argument.startswith("--"):
            found[argument] = []
        elif found:
            found[next(reversed(found))].append(json.loads(argument) if argument.startswith("{") else argument)
        else:
            before.append(argument)
    return before, found


def test_clients_of_a_gateway_with_tls_use_tls() -> None:
    tls = {"cert": "/tls/tls.crt", "key": "/tls/tls.key"}
    rendered = Rendered.of(values={"engines": {"a": ENGINE}, "config": {"server": {"tls": tls}}})
    assert rendered.one("Service")["spec"]["ports"][0]["appProtocol"] == "https"
    assert "https://gw-vllm-gateway:80/health" in rendered.one("Pod", "gw-vllm-gateway-test")["spec"]["containers"][0]["args"][0]


def test_the_notes_after_the_installation_use_the_gateways_scheme() -> None:
    plain: dict[str, Any] = {"engines": {"a": ENGINE}}
    tls = plain | {"config": {"server": {"tls": {"cert": "/tls/tls.crt", "key": "/tls/tls.key"}}}}
    for values, reported in ((plain, "curl http://127.0.0.1:8000/"), (tls, "curl --insecure https://127.0.0.1:8000/")):
        done = helm("install", "gw", CHART, "--dry-run=client", values=values)
        assert done.returncode == 0 and reported in done.stdout.partition("NOTES:")[2], done.stdout[-2000:] + done.stderr


def test_large_numbers_stay_numbers() -> None:
    limits = {"tokens_per_day": 50_000_000, "tokens_per_month": 12_345_678_901}
    config = {"teams": [{"id": "t", "limits": limits}]}
    assert Rendered.of(values={"engines": {"a": ENGINE}, "config": config}).config["teams"][0]["limits"] == limits


def test_engines_scale_by_queue_length_and_from_zero_by_requests(cases: dict[str, Rendered]) -> None:
    def queries(name: str) -> list[str]:
        (scaled,) = cases[name].all("ScaledObject")
        return [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]

    waiting = [
        'sum(vllm:num_requests_waiting{namespace="llm", model="org/model"}) or vector(0)',
        'sum(vllm_gateway_queued_requests{namespace="llm", model="org/model"}) or vector(0)',
    ]
    assert queries("everything that may be on") == waiting
    (requested,) = queries("scaled to nothing")[2:]
    assert "vllm_gateway_requests_total" in requested
    assert {name.removeprefix(PREFIX) for name in re.findall(rf"{PREFIX}\w+", " ".join([*waiting, requested]))} <= set(FAMILIES)


@pytest.mark.parametrize(
    ("series", "starts"),
    [
        ({"200": "0x40"}, []),
        ({"200": "0x40", "503": "_x20 1x20"}, [22]),
        ({"200": "0x40", "503": "0x20 1x20"}, [22]),
        ({"200": "0x20 7x20"}, [22]),
        ({"200": "5x40", "503": "3x40"}, []),
    ],
    ids=["nothing", "the first refusal", "another refusal", "answers", "requests of before"],
)
def test_one_request_starts_an_engine_from_nothing(
    cases: dict[str, Rendered], tmp_path: Path, series: dict[str, str], starts: list[int]
) -> None:
    """promtool evaluates KEDA's query: a series begins with the first request that ends so, with 1 and not with 0."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    (scaled,) = cases["scaled to nothing"].all("ScaledObject")
    query = scaled["spec"]["triggers"][2]["metadata"]["query"]
    labels = 'namespace="llm", model="org/model", endpoint="/v1/chat/completions"'
    given = [{"series": f'vllm_gateway_requests_total{{{labels}, code="{code}"}}', "values": values} for code, values in series.items()]
    alert = {"alert": "Starts", "expr": f"({query}) > 0"}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "keda", "rules": [alert]}]}))
    checks = [{"alertname": "Starts", "eval_time": f"{minute}m", "exp_alerts": [{}] if minute in starts else []} for minute in (15, 22, 35)]
    test = {"interval": "1m", "input_series": given, "alert_rule_test": checks}
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(document))
    done = subprocess.run([promtool, "test", "rules", tmp_path / "test.yaml"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_generated_key_is_in_the_file_by_its_hash_alone(cases: dict[str, Rendered]) -> None:
    secret = content(cases["one-gpu"].one("Secret", "gw-vllm-gateway-keys"))
    (key,) = yaml.safe_load(secret["keys.yaml"])["keys"]
    assert key == {"id": "admin", "hash": hash_of(secret["key"])}
    (volume,) = [each for each in cases["one-gpu"].pod()["volumes"] if each["name"] == "keys"]
    assert [item["key"] for item in volume["secret"]["items"]] == ["keys.yaml"]


def test_a_release_and_a_namespace_may_have_names_that_yaml_reads_as_other_types() -> None:
    values = {"engines": {"a": ENGINE}, "networkPolicy": EVERYTHING}
    done = helm("template", "no", CHART, "--namespace", "no", values=values)
    assert done.returncode == 0, done.stderr
    rendered = Rendered(tuple(each for each in yaml.safe_load_all(done.stdout) if each))
    for each in rendered.manifests:
        metadata = each["metadata"]
        assert (metadata["namespace"], metadata["labels"]["app.kubernetes.io/instance"]) == ("no", "no")
    assert rendered.all("RoleBinding")[0]["subjects"][0]["namespace"] == "no"
    (policy, _) = rendered.all("NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "no"
    assert judged({"no": rendered}) == {"no": []}


def test_objects_of_the_operator_may_be_texts_with_templates(cases: dict[str, Rendered]) -> None:
    made = cases["extras"]
    assert made.one("ConfigMap", "gw-more")["data"] == {"a": "b"}
    assert made.one("ConfigMap", "as-text")["data"] == {"port": "80"}


def test_no_secret_is_made_where_one_exists(cases: dict[str, Rendered]) -> None:
    assert cases["many-replicas"].all("Secret") == []


def test_the_time_to_end_covers_what_is_under_way(cases: dict[str, Rendered]) -> None:
    assert cases["many-replicas"].pod()["terminationGracePeriodSeconds"] == 15 + 5 + 600 + 15
    assert cases["external-servers"].pod()["terminationGracePeriodSeconds"] == 10 + 5 + 600 + 15
    for rendered in cases.values():
        for each in rendered.workloads().values():
            pod = each["spec"]["template"]["spec"]
            assert pod["terminationGracePeriodSeconds"] > pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] + 100


def test_a_token_of_the_cluster_is_mounted_only_for_discovery(cases: dict[str, Rendered]) -> None:
    given = {name: rendered.pod()["automountServiceAccountToken"] for name, rendered in cases.items()}
    assert {name for name, token in given.items() if not token} == {
        "dns",
        "keys in the configuration",
        "values-keys.yaml",
        "values-persistence.yaml",
    }
    for rendered in cases.values():
        for role in rendered.all("Role"):
            assert role["rules"] == [
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
            ]
    assert [role["metadata"]["namespace"] for role in cases["external-servers"].all("Role")] == ["research"]


def test_releases_of_one_name_may_read_the_same_namespace() -> None:
    """Helm refuses an object that another release has made."""

    def roles(namespace: str) -> set[tuple[str, str]]:
        discovers = [{"id": name, "discover": {"kubernetes": {"service": "vllm", "namespace": name}}} for name in ("research", "prod")]
        done = helm("template", "gw", CHART, "--namespace", namespace, values={"config": {"models": discovers}})
        assert done.returncode == 0, done.stderr
        rendered = Rendered(tuple(each for each in yaml.safe_load_all(done.stdout) if each))
        made = [{(each["metadata"]["namespace"], each["metadata"]["name"]) for each in rendered.all(kind)} for kind in _RIGHTS]
        assert made[0] == made[1] and {each["roleRef"]["name"] for each in rendered.all("RoleBinding")} == {name for _, name in made[0]}
        return made[0]

    assert len(roles("prod")) == len(roles("staging")) == 2
    assert not roles("prod") & roles("staging")


def test_pods_are_restricted(cases: dict[str, Rendered]) -> None:
    for rendered in cases.values():
        pods = [each["spec"]["template"]["spec"] for each in rendered.workloads().values()] + [each["spec"] for each in rendered.all("Pod")]
        for pod in pods:
            assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            (container,) = pod["containers"]
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_only_a_change_of_what_needs_a_restart_rolls_the_pods() -> None:
    def annotations(**config: Any) -> dict[str, str]:
        rendered = Rendered.of(values={"engines": {"a": ENGINE}, "config": config})
        return dict(rendered.workload()["spec"]["template"]["metadata"]["annotations"])

    assert annotations() == annotations(log={"level": "debug"})
    changes: dict[str, Any] = {
        "server.host": "::",
        "server.port": 9000,
        "server.workers": 2,
        "server.tls": {"cert": "/tls/tls.crt", "key": "/tls/tls.key"},
        "server.admin.host": "::",
        "server.admin.port": 9000,
        "server.admin.tls": {"cert": "/tls/tls.crt", "key": "/tls/tls.key"},
        "ledger": {"url": "sqlite:////tmp/usage.db", "retention": "90d"},
        "store": {"url": "sqlite:////tmp/keys.db"},
        "audit": {"secret": {"env": "AUDIT_SECRET"}, "file": "/tmp/audit.jsonl"},
        "sign_in": {"key": {"env": "SESSION_KEY"}, "url": "https://llm.example.com"},
        "notices": [{"name": "team", "webhook": {"env": "WEBHOOK"}, "for": "team"}],
    }
    assert changes.keys() == NEEDS_RESTART.keys()
    for path, change in changes.items():
        section, *names = path.split(".")
        for name in reversed(names):
            change = {name: change}
        assert annotations() != annotations(**{section: change}), path


def test_promtool_accepts_the_alerts(two_models: Rendered, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(two_models.one("PrometheusRule")["spec"]))
    done = subprocess.run([promtool, "check", "rules", "--lint=all", "--lint-fatal", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboards_are_those_of_the_project(two_models: Rendered) -> None:
    shown = two_models.one("ConfigMap", "gw-vllm-gateway-dashboards")["data"]
    there = {f"vllm-gateway-{file.name}": json.loads(file.read_text()) for file in (CHART.parents[1] / "grafana").glob("*.json")}
    assert {name: json.loads(text) for name, text in shown.items()} == there


def test_alerts_and_dashboards_link_to_the_addresses_that_are_set() -> None:
    addresses = {"prometheusRule": EVERYTHING | {"runbooks": "https://docs.test/alerts.html"}}
    addresses["dashboards"] = EVERYTHING | {"console": "https://gateway.test:9443/"}
    made = Rendered.of(values={"engines": {"a": ENGINE}, "monitoring": addresses})
    rules = [rule for group in made.one("PrometheusRule")["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    assert all(rule["annotations"]["runbook_url"].startswith("https://docs.test/alerts.html#") for rule in rules)
    for text in made.one("ConfigMap", "gw-vllm-gateway-dashboards")["data"].values():
        (console,) = (each for each in json.loads(text)["templating"]["list"] if each["name"] == "console")
        assert console["query"] == console["current"]["value"] == "https://gateway.test:9443"


def test_engines_may_be_stopped_before_others_start() -> None:
    """The API server refuses the settings of one strategy beside the other."""
    rendered = Rendered.of(values={"engines": {"a": ENGINE | {"strategy": {"type": "Recreate"}}, "b": ENGINE}})
    assert rendered.workload("engine-a")["spec"]["strategy"] == {"type": "Recreate"}
    assert rendered.workload("engine-b")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_an_engine_is_stopped_when_its_streams_have_moved() -> None:
    lifecycle = Rendered.of(values={"engines": {"a": ENGINE}}).container("engine-a")["lifecycle"]
    assert lifecycle["preStop"]["sleep"]["seconds"] >= Model(id="a", servers=()).move_after + SPREAD


def test_without_a_sleep_nothing_comes_before_the_signal() -> None:
    """Kubernetes takes a sleep of 0 seconds only from 1.33 on."""
    rendered = Rendered.of(values={"engines": {"a": ENGINE | {"preStopSleep": 0}, "b": ENGINE}, "preStopSleep": 0})
    assert "lifecycle" not in rendered.container() and "lifecycle" not in rendered.container("engine-a")
    assert rendered.container("engine-b")["lifecycle"] == {"preStop": {"sleep": {"seconds": 10}}}


def test_a_variable_of_the_operator_replaces_the_charts() -> None:
    """Helm 4 applies on the server's side, where a name that stands twice in a list is refused."""
    mine = [{"name": "DO_NOT_TRACK", "value": "0"}, {"name": "MORE", "value": "1"}]
    engine = ENGINE | {"env": {"HF_HOME": "/models"}, "extraEnv": mine}
    rendered = Rendered.of(values={"engines": {"a": engine}, "extraEnv": [{"name": "HOME", "value": "/home"}]})
    assert [each["value"] for each in rendered.container()["env"] if each["name"] == "HOME"] == ["/home"]
    given = rendered.container("engine-a")["env"]
    variables = {each["name"]: each.get("value") for each in given}
    assert len(variables) == len(given)
    assert variables.items() >= {("HF_HOME", "/models"), ("DO_NOT_TRACK", "0"), ("MORE", "1"), ("HOME", "/cache/home"), ("USER", "vllm")}


# Rejected values


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"replicaz": 2}, "replicaz"),
        ({"image": {"tga": "1"}}, "tga"),
        ({"config": {"servr": {}}}, "servr"),
        ({"config": {"server": {"drian": "1m"}}}, "drian"),
        ({"config": {"server": {"drain": "soon"}}}, "drain"),
        ({"config": {"models": [{"id": "m", "launhc": {}}]}}, "launhc"),
        ({"engines": {"a": {"modle": {"id": "m"}}}}, "modle"),
        ({"engines": {"a": {"model": {"id": "m", "alias": ["x"]}}}}, "alias"),
        ({"engines": {"a": {"model": {"id": "m", "launch": {}}}}}, "launch"),
        ({"engines": {"a": ENGINE}, "securityContext": {"privilegd": True}}, "privilegd"),
        ({"engines": {"A_b": ENGINE}}, "A_b"),
        ({"engines": {"admin": ENGINE}}, "engines.admin: the admin port's Service has that name"),
        ({"engines": {"a": ENGINE | {"gpus": "two"}}}, "gpus"),
        ({"engineDefaults": {"cache": {"sise": "1Gi"}}}, "sise"),
        ({"engines": {"a": ENGINE}, "discovery": "consul"}, "discovery"),
        ({"engines": {"a": ENGINE | {"args": {"port": 1}}}}, "args.port is set by the chart"),
        ({"engines": {"a": ENGINE | {"args": {"config": "/c.yaml"}}}}, "args.config: vLLM reads one configuration file"),
        ({"engines": {"a": ENGINE}, "persistence": {"updateStrategy": {"type": "Recreate"}}}, "updateStrategy"),
        ({"engines": {"a": ENGINE}, "engineKey": {"generation": 0}}, "generation"),
        ({"engines": {"a": {"model": {"id": "m", "loras": [{"id": "l"}]}}}}, "l needs a path"),
        ({"engines": {"a": ENGINE}, "terminationGracePeriodSeconds": 60}, "is less than preStopSleep"),
        ({"engines": {"a": ENGINE}, "terminationGracePeriodSeconds": 0}, "is less than preStopSleep"),
        ({"engines": {"a": ENGINE}, "config": {"keys_file": "x"}}, "config.keys_file: the chart sets it"),
        ({"engines": {"a": ENGINE}, "config": {"server": {"admin": {"host": "127.0.0.1"}}}}, "config.server.admin.host: 127.0.0.1 is"),
        ({"engines": {"a": ENGINE}, "config": {"server": {"workers": "auto"}}}, "workers: auto needs resources.limits.cpu"),
        ({"engines": {"a": ENGINE}, "httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({"engines": {"a": ENGINE}, "ingress": {"enabled": True}}, "ingress.hosts"),
        ({}, "there is no model"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_cannot_be_meant_is_refused(values: dict[str, Any], says: str) -> None:
    done = template(values=values)
    assert done.returncode != 0 and says in done.stderr, done.stderr


def test_a_worker_for_each_cpu_needs_a_limit_of_cpus() -> None:
    workers = {"config": {"server": {"workers": "auto"}}, "resources": {"limits": {"cpu": 4}}}
    done = template(values={"engines": {"a": ENGINE}, **workers})
    assert done.returncode == 0 and "workers: auto" in done.stdout, done.stderr


def test_lint_finds_a_misspelt_setting_of_the_gateway() -> None:
    models = [{"id": "m", "timeouts": {"totl": "1h"}}]
    done = helm("lint", "--strict", CHART, values={"engines": {"a": ENGINE}, "config": {"models": models}})
    assert done.returncode != 0 and "totl" in done.stdout, done.stdout


# Running


def test_the_commands_of_the_containers_run(tmp_path: Path) -> None:
    """Both engines of an example as simulators, the gateway in front of them, a request through it, and a change of a key."""
    two_models = Rendered.of(CHART / "examples" / "two-models.yaml", values={"rbac": {"create": False}})
    root = tmp_path / "root"
    mounted(two_models, root)
    key = content(two_models.one("Secret", "gw-vllm-gateway-keys"))["key"]
    token = content(two_models.one("Secret", "gw-vllm-gateway-admin-token"))["token"]
    with engine(two_models, "engine-llama", root) as llama, engine(two_models, "engine-embed", root) as embed:
        config = here(root, {"meta-llama/Llama-3.3-70B-Instruct": llama, "Qwen/Qwen3-Embedding-0.6B": embed})
        container = two_models.container()
        assert container["command"] == ["vllm-gateway", "serve", "/etc/vllm-gateway/config/gateway.yaml"]  # as `gateway` runs it
        with gateway(config, None, seconds=60) as one:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert one.get(container[probe]["httpGet"]["path"]).status_code == 200
            assert one.get("/status").status_code == one.get("/metrics").status_code == 401
            shown = httpx2.get(f"http://127.0.0.1:{one.admin}/status", headers={"authorization": f"Bearer {token}"}, timeout=60)
            assert shown.status_code == 200
            chat: dict[str, Any] = {"model": "llama-legal", "messages": [{"role": "user", "content": "Hello"}]}
            assert post_json(one.url, key, "/v1/chat/completions", chat)["model"] == "llama-legal"
            assert post_json(one.url, key, "/v1/embeddings", {"model": "embed", "input": "Hello"})["data"]
            assert hooked(two_models, one.url) == 0
            write(root / "etc/vllm-gateway/keys/keys.yaml", {"keys": [{"id": "admin", "hash": hash_of(KEY)}]})
            wait_for(lambda: one.request(**chat).status_code == 200, 60)
            assert httpx2.get(f"{one.url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=60).status_code == 401


def post_json(url: str, key: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx2.post(url + path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)
    assert response.status_code == 200, response.text
    return dict(response.json())


def hooked(rendered: Rendered, url: str) -> int:
    """The exit code of what `helm test` runs, with the gateway's URL in place of the Service's."""
    (container,) = rendered.one("Pod", "gw-vllm-gateway-test")["spec"]["containers"]
    assert container["command"] == ["python3", "-c"]
    (script,) = container["args"]
    there = "http://gw-vllm-gateway:80"
    assert there in script
    return subprocess.run([sys.executable, "-c", script.replace(there, url)], timeout=60).returncode
