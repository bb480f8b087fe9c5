{{- define "vllm-gateway.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "vllm-gateway.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := include "vllm-gateway.name" . }}
{{- contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "vllm-gateway.selector" -}}
app.kubernetes.io/name: {{ include "vllm-gateway.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "vllm-gateway.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "vllm-gateway.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Labels of a pod: (list ROOT COMPONENT). Nothing in them changes with the chart's version, since a change restarts the pods. */ -}}
{{- define "vllm-gateway.podLabels" -}}
{{ include "vllm-gateway.selector" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- /* Metadata of an object: (list ROOT COMPONENT NAME) */ -}}
{{- define "vllm-gateway.metadata" -}}
name: {{ index . 2 }}
namespace: {{ (index . 0).Release.Namespace | quote }}
labels:
  {{- include "vllm-gateway.labels" (index . 0) | nindent 2 }}
  app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "vllm-gateway.image" -}}
{{- .image.digest | empty | ternary (printf "%s:%s" .image.repository (default .tag .image.tag)) (printf "%s@%s" .image.repository .image.digest) }}
{{- end }}

{{- define "vllm-gateway.serviceAccount" -}}
{{- default (.Values.serviceAccount.create | ternary (include "vllm-gateway.fullname" .) "default") .Values.serviceAccount.name }}
{{- end }}

{{- define "vllm-gateway.keysSecret" -}}
{{- default (printf "%s-keys" (include "vllm-gateway.fullname" .)) .Values.keys.existingSecret }}
{{- end }}

{{- define "vllm-gateway.engineSecret" -}}
{{- default (printf "%s-engine-key" (include "vllm-gateway.fullname" .)) .Values.engineKey.existingSecret }}
{{- end }}

{{- define "vllm-gateway.adminSecret" -}}
{{- default (printf "%s-admin-token" (include "vllm-gateway.fullname" .)) .Values.adminToken.existingSecret }}
{{- end }}

{{- /* Whether the chart sets the admin port's token: true or empty */ -}}
{{- define "vllm-gateway.setsAdminToken" -}}
{{- if and .Values.adminToken.enabled (not ((.Values.config.server).admin).token) }}true{{ end }}
{{- end }}

{{- /* Whether the chart makes a token of the role viewer for the ServiceMonitor: true or empty. An open admin port stays open. */ -}}
{{- define "vllm-gateway.makesMetricsToken" -}}
{{- $admin := (.Values.config.server).admin | default dict }}
{{- $isGuarded := or (include "vllm-gateway.setsAdminToken" .) $admin.token $admin.tokens }}
{{- with .Values.monitoring.serviceMonitor }}
{{- if and .enabled (not .tokenSecret) $isGuarded }}true{{ end }}
{{- end }}
{{- end }}

{{- define "vllm-gateway.metricsSecret" -}}
{{- default (printf "%s-metrics-token" (include "vllm-gateway.fullname" .)) .Values.monitoring.serviceMonitor.tokenSecret }}
{{- end }}

{{- /* The token of the ServiceMonitor. The Secret has it and the configuration its hash, so it is generated once and remembered. */ -}}
{{- define "vllm-gateway.metricsToken" -}}
{{- if not (hasKey .Values "metricsToken") }}
{{- $before := (lookup "v1" "Secret" .Release.Namespace (include "vllm-gateway.metricsSecret" .)).data | default dict }}
{{- $_ := set .Values "metricsToken" (get $before .Values.monitoring.serviceMonitor.tokenKey | b64dec | default (randAlphaNum 48)) }}
{{- end }}
{{- .Values.metricsToken }}
{{- end }}

{{- /* The entry of the engines' Secret with the keys that they accept; "" if they accept only one key */ -}}
{{- define "vllm-gateway.acceptedKeys" -}}
{{- if .Values.engineKey.enabled }}
{{- default (empty .Values.engineKey.existingSecret | ternary "vllm.yaml" "") .Values.engineKey.accepted }}
{{- end }}
{{- end }}

{{- /* The kind of the gateway: Deployment, or StatefulSet with volumes */ -}}
{{- define "vllm-gateway.kind" -}}
{{- .Values.persistence.enabled | ternary "StatefulSet" "Deployment" }}
{{- end }}

{{- /* Update strategy. When another type is merged over the default, its rollingUpdate stays, and the API server rejects both. */ -}}
{{- define "vllm-gateway.strategy" -}}
{{- eq .type "RollingUpdate" | ternary . (omit . "rollingUpdate") | toYaml }}
{{- end }}

{{- /* Replicas of an autoscaled workload: the current number, at least MINIMUM; without a cluster MINIMUM.
Leaving the number out would set it to 1 where it was set before. (list ROOT KIND NAME MINIMUM) */ -}}
{{- define "vllm-gateway.scaledReplicas" -}}
{{- $live := lookup "apps/v1" (index . 1) (index . 0).Release.Namespace (index . 2) }}
{{- max (index . 3 | int64) (($live.spec).replicas | int64) }}
{{- end }}

{{- /* Whole seconds of a duration of gateway.yaml, rounded up */ -}}
{{- define "vllm-gateway.seconds" -}}
{{- $unit := regexFind "[a-z]+$" . }}
{{- $number := trimSuffix $unit . | float64 }}
{{- mulf $number (get (dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 "d" 86400.0) $unit) | ceil | int64 }}
{{- end }}

{{- define "vllm-gateway.scheme" -}}
{{- empty (.Values.config.server).tls | ternary "http" "https" }}
{{- end }}

{{- /* The settings of config.server that need a restart, as JSON; gateway/config/diff.py lists the same. */ -}}
{{- define "vllm-gateway.server" -}}
{{- $server := .Values.config.server | default dict }}
{{- $admin := $server.admin | default dict }}
{{- $ofAdmin := merge (dict "tls" (empty $admin.tls | not)) (pick $admin "host" "port") }}
{{- merge (dict "tls" (empty $server.tls | not) "admin" $ofAdmin) (pick $server "host" "port" "workers") | toJson }}
{{- end }}

{{- define "vllm-gateway.grace" -}}
{{- $server := .Values.config.server | default dict }}
{{- $needed := add .Values.preStopSleep 15 (include "vllm-gateway.seconds" (default "0s" $server.linger)) (include "vllm-gateway.seconds" (default "30s" $server.drain)) }}
{{- $given := kindIs "invalid" .Values.terminationGracePeriodSeconds | ternary $needed .Values.terminationGracePeriodSeconds | int64 }}
{{- if lt $given $needed }}
{{- fail (printf "terminationGracePeriodSeconds: %d is less than preStopSleep, config.server.linger, config.server.drain and 15 together: %d" $given $needed) }}
{{- end }}
{{- $given }}
{{- end }}

{{- /* The chart's variables without those that the operator sets, because names must be unique: (list OURS NAMES LIST) */ -}}
{{- define "vllm-gateway.variables" -}}
{{- $named := index . 1 }}
{{- range index . 2 }}
{{- $named = append $named .name }}
{{- end }}
{{- range $name, $value := index . 0 }}
{{- if not (has $name $named) }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{- /* The discovery of engines: kubernetes or dns */ -}}
{{- define "vllm-gateway.discovery" -}}
{{- eq .Values.discovery "auto" | ternary (.Values.rbac.create | ternary "kubernetes" "dns") .Values.discovery }}
{{- end }}

{{- /* The namespaces whose EndpointSlices the gateway reads, as JSON; otherwise "" */ -}}
{{- define "vllm-gateway.namespaces" -}}
{{- $found := list }}
{{- if and .Values.engines (eq (include "vllm-gateway.discovery" .) "kubernetes") }}
{{- $found = append $found .Release.Namespace }}
{{- end }}
{{- range .Values.config.models }}
{{- with ((.discover).kubernetes) }}
{{- $found = append $found (default $.Release.Namespace .namespace) }}
{{- end }}
{{- end }}
{{- $found | uniq | sortAlpha | toJson }}
{{- end }}

{{- /* An engine with its defaults, as JSON: (list ROOT NAME) */ -}}
{{- define "vllm-gateway.engine" -}}
{{- $root := index . 0 }}{{- $name := index . 1 }}
{{- $engine := mustMergeOverwrite (deepCopy $root.Values.engineDefaults) (deepCopy (get $root.Values.engines $name)) }}
{{- $_ := set $engine "fullname" (printf "%s-%s" (include "vllm-gateway.fullname" $root) $name | trunc 63 | trimSuffix "-") }}
{{- $_ := set $engine "weights" (default $engine.model.id $engine.weights) }}
{{- $_ := set $engine "acceptedKeys" (include "vllm-gateway.acceptedKeys" $root) }}
{{- $engine | toJson }}
{{- end }}

{{- /* The models of gateway.yaml: those of config, then the engines' with their discovery, as JSON */ -}}
{{- define "vllm-gateway.models" -}}
{{- $models := .Values.config.models | default list }}
{{- range $name := keys .Values.engines | sortAlpha }}
{{- $engine := include "vllm-gateway.engine" (list $ $name) | fromJson }}
{{- $discover := dict "kubernetes" (dict "service" $engine.fullname) }}
{{- if eq (include "vllm-gateway.discovery" $) "dns" }}
{{- $discover = dict "dns" (dict "name" (printf "%s.%s.svc" $engine.fullname $.Release.Namespace) "port" $engine.port) }}
{{- end }}
{{- if $.Values.engineKey.enabled }}
{{- $_ := set $discover "api_key" (dict "file" "/etc/vllm-gateway/engine/key") }}
{{- end }}
{{- $models = append $models (merge (dict "discover" $discover) $engine.model) }}
{{- end }}
{{- if not $models }}
{{- fail "there is no model: name one under engines, or under config.models" }}
{{- end }}
{{- $models | toJson }}
{{- end }}

{{- define "vllm-gateway.config" -}}
{{- $server := .Values.config.server | default dict }}
{{- range $name, $host := dict "host" (default "0.0.0.0" $server.host) "admin.host" (default "127.0.0.1" ($server.admin).host) }}
{{- if has $host (list "127.0.0.1" "::1" "localhost") }}
{{- fail (printf "config.server.%s: %s is reached from within the pod alone, not by Services and probes" $name $host) }}
{{- end }}
{{- end }}
{{- if and (eq (toString $server.workers) "auto") (not ((.Values.resources).limits).cpu) }}
{{- fail "config.server.workers: auto needs resources.limits.cpu; without it, a pod has a worker for each CPU of its node" }}
{{- end }}
{{- $config := merge (dict "models" (include "vllm-gateway.models" . | fromJsonArray)) .Values.config }}
{{- if .Values.keys.enabled }}
{{- if $config.keys_file }}
{{- fail "config.keys_file: the chart sets it with keys.enabled; name the Secret as keys.existingSecret" }}
{{- end }}
{{- $config = merge (dict "keys_file" (printf "/etc/vllm-gateway/keys/%s" .Values.keys.file)) $config }}
{{- end }}
{{- if include "vllm-gateway.setsAdminToken" . }}
{{- $token := dict "token" (dict "file" "/etc/vllm-gateway/admin/token") }}
{{- $config = merge (dict "server" (dict "admin" $token)) $config }}
{{- end }}
{{- if include "vllm-gateway.makesMetricsToken" . }}
{{- $hash := include "vllm-gateway.metricsToken" . | sha256sum | printf "sha256:%s" }}
{{- $tokens := append (($server.admin).tokens | default list) (dict "name" "service-monitor" "hash" $hash "role" "viewer") }}
{{- $config = merge (dict "server" (dict "admin" (dict "tokens" $tokens))) $config }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{- /* A value as a command-line argument */ -}}
{{- define "vllm-gateway.word" -}}
{{- kindIs "string" . | ternary . (toRawJson .) }}
{{- end }}

{{- /* The arguments of an engine's command, as a JSON list; the same as upstream/vllm/command_line.py for launch.args */ -}}
{{- define "vllm-gateway.engineArgs" -}}
{{- $flags := dict "served-model-name" (list .model.id) "host" .host "port" .port "shutdown-timeout" (include "vllm-gateway.seconds" .drain | int64) }}
{{- with .acceptedKeys }}
{{- $_ := set $flags "config" "/etc/vllm-gateway/engine/vllm.yaml" }}
{{- end }}
{{- with .model.loras }}
{{- $modules := list }}
{{- range . }}
{{- $modules = append $modules (dict "name" .id "path" (required (printf "engines: model.loras: %s needs a path" .id) .path) "base_model_name" $.model.id) }}
{{- end }}
{{- $_ := set $flags "enable-lora" true }}
{{- $_ := set $flags "lora-modules" $modules }}
{{- if gt (len .) 1 }}
{{- $_ := set $flags "max-loras" (min (len .) 8) }}
{{- $_ := set $flags "max-cpu-loras" (len .) }}
{{- end }}
{{- end }}
{{- range $key, $value := .args }}
{{- $parts := splitList "." (trimPrefix "--" $key) }}
{{- $head := first $parts | replace "_" "-" }}
{{- $flag := prepend (rest $parts) $head | join "." }}
{{- if has $flag (list "api-key" "model" "served-model-name" "host" "port" "uds") }}
{{- fail (printf "engines: args.%s is set by the chart" $key) }}
{{- end }}
{{- if and (eq $flag "config") $.acceptedKeys }}
{{- fail (printf "engines: args.%s: vLLM reads one configuration file, and the chart's has the keys that engines accept (engineKey.accepted)" $key) }}
{{- end }}
{{- $_ := set $flags $flag $value }}
{{- end }}
{{- $most := .autoscaling.enabled | ternary .autoscaling.maxReplicas .replicas | int64 }}
{{- $generates := and (ne (toString $flags.runner) "pooling") (not (has (toString $flags.convert) (list "embed" "classify"))) }}
{{- if and (gt $most 1) $generates (ne (toString .model.resume) "false") (not (hasKey $flags "enable-scale-out")) }}
{{- $_ := set $flags "enable-scale-out" true }}
{{- end }}
{{- $words := list .weights }}
{{- range $flag, $value := $flags }}
{{- if kindIs "bool" $value }}
{{- $words = append $words (printf "--%s%s" ($value | ternary "" "no-") $flag) }}
{{- else if kindIs "slice" $value }}
{{- $words = append $words (printf "--%s" $flag) }}
{{- range $value }}
{{- $words = append $words (include "vllm-gateway.word" .) }}
{{- end }}
{{- else }}
{{- $word := include "vllm-gateway.word" $value }}
{{- $words = hasPrefix "-" $word | ternary (append $words (printf "--%s=%s" $flag $word)) (concat $words (list (printf "--%s" $flag) $word)) }}
{{- end }}
{{- end }}
{{- $words | toJson }}
{{- end }}
