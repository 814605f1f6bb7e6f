{{- /* Everything that is wrong with the values, all of it at once. */ -}}
{{- define "warmroute.validate" -}}
{{- $problems := concat
  (include "warmroute.problems.refused" . | fromJsonArray)
  (include "warmroute.problems.pool" . | fromJsonArray)
  (include "warmroute.problems.picker" . | fromJsonArray)
  (include "warmroute.problems.replicas" . | fromJsonArray)
  (include "warmroute.problems.ports" . | fromJsonArray)
  (include "warmroute.problems.idle" . | fromJsonArray)
  (include "warmroute.problems.envoyGateway" . | fromJsonArray) -}}
{{- if $problems }}{{ fail (printf "\n- %s\n" (join "\n- " $problems)) }}{{ end -}}
{{- end -}}

{{- /* Values of other charts that mean nothing here. */ -}}
{{- define "warmroute.problems.refused" -}}
{{- $problems := list -}}
{{- range $row := .Files.Get "files/refused.json" | fromJsonArray -}}
  {{- $at := $.Values -}}
  {{- $there := true -}}
  {{- range $key := splitList "." $row.path -}}
    {{- if and $there (kindIs "map" $at) (hasKey $at $key) }}{{ $at = index $at $key }}{{ else }}{{ $there = false }}{{ end -}}
  {{- end -}}
  {{- $written := toJson $at -}}
  {{- if and $there (ternary (has $written $row.only) (not (has $written $row.harmless)) (not (empty $row.only))) -}}
    {{- $problems = append $problems (printf "%s: %s" $row.path $row.instead) -}}
  {{- end -}}
{{- end -}}
{{- toJson $problems -}}
{{- end -}}

{{- define "warmroute.problems.pool" -}}
{{- $problems := list -}}
{{- if regexMatch "^[0-9]" .Release.Name -}}
  {{- $problems = append $problems (printf "release name %s: names of Services start with a letter; choose another" .Release.Name) -}}
{{- end -}}
{{- if and .Values.router.inferenceObjectives (not .Values.router.inferencePool.create) -}}
  {{- $problems = append $problems "router.inferenceObjectives: objectives belong to a pool; set router.inferencePool.create: true, or write them into the picker's configuration" -}}
{{- end -}}
{{- if .Values.httpRoute.create -}}
  {{- if eq .Values.mode "standalone" -}}
    {{- $problems = append $problems "httpRoute.create: there is no gateway in mode standalone; write mode: gateway, or leave it out" -}}
  {{- end -}}
  {{- if not (or .Values.router.inferencePool.create (include "warmroute.envoyGateway" .)) -}}
    {{- $problems = append $problems "httpRoute.create: the route leads to a pool; set router.inferencePool.create: true" -}}
  {{- end -}}
{{- end -}}
{{- toJson $problems -}}
{{- end -}}

{{- define "warmroute.problems.picker" -}}
{{- $problems := list -}}
{{- $epp := .Values.router.epp -}}
{{- if contains "llm-d-router-endpoint-picker" $epp.image.repository -}}
  {{- $problems = append $problems "router.epp.image.repository: that is another picker; name the image built from Warmroute's Dockerfile, or leave router.epp.image out" -}}
{{- end -}}
{{- if and $epp.pluginsConfig (hasKey ($epp.pluginsCustomConfig | default dict) $epp.pluginsConfigFile) -}}
  {{- $problems = append $problems (printf "router.epp.pluginsConfig: %s is in router.epp.pluginsCustomConfig too; write it in one of them" $epp.pluginsConfigFile) -}}
{{- end -}}
{{- $files := include "warmroute.configFiles" . | fromYaml -}}
{{- if not (hasKey $files $epp.pluginsConfigFile) -}}
  {{- $problems = append $problems (printf "router.epp.pluginsConfigFile: there is no %s; there are %s" $epp.pluginsConfigFile (keys $files | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $drain := include "warmroute.seconds" (include "warmroute.drainTimeout" .) | int -}}
{{- if le (int $epp.terminationGracePeriodSeconds) $drain -}}
  {{- $problems = append $problems (printf "router.epp.terminationGracePeriodSeconds: %d is no more than the drain-timeout of %d s; add the longest answer to that" (int $epp.terminationGracePeriodSeconds) $drain) -}}
{{- end -}}
{{- if and .Values.router.tokenizer.enabled (not .Values.router.tokenizer.modelName) -}}
  {{- $problems = append $problems "router.tokenizer.modelName: name the model whose prompts are rendered" -}}
{{- end -}}
{{- toJson $problems -}}
{{- end -}}

{{- define "warmroute.problems.replicas" -}}
{{- $problems := list -}}
{{- $epp := .Values.router.epp -}}
{{- if include "warmroute.leader" . -}}
  {{- if $epp.autoscaling.enabled -}}
    {{- $problems = append $problems "router.epp.autoscaling.enabled: replicas that wait for the lease take no load; leave out flags.ha-enable-leader-election, so that all serve" -}}
  {{- end -}}
  {{- if $epp.podDisruptionBudget -}}
    {{- $problems = append $problems "router.epp.podDisruptionBudget: only the leader is ready, so a budget keeps its node from being drained; leave it out, or leave out flags.ha-enable-leader-election" -}}
  {{- end -}}
{{- end -}}
{{- range $path, $budget := dict "router.epp" $epp.podDisruptionBudget "router.proxy" .Values.router.proxy.podDisruptionBudget -}}
  {{- if and $budget (eq (hasKey $budget "minAvailable") (hasKey $budget "maxUnavailable")) -}}
    {{- $problems = append $problems (printf "%s.podDisruptionBudget: write one of minAvailable and maxUnavailable" $path) -}}
  {{- end -}}
{{- end -}}
{{- range $path, $scaling := dict "router.epp" $epp.autoscaling "router.proxy" .Values.router.proxy.autoscaling -}}
  {{- if $scaling.enabled -}}
    {{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
      {{- $problems = append $problems (printf "%s.autoscaling: minReplicas %d is above maxReplicas %d" $path (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
    {{- end -}}
    {{- range $resource, $target := dict "cpu" $scaling.targetCPUUtilizationPercentage "memory" $scaling.targetMemoryUtilizationPercentage -}}
      {{- range $at, $resources := include "warmroute.scaledResources" (dict "root" $ "path" $path) | fromJson -}}
        {{- if and $target (not $scaling.metrics) (not (dig "requests" $resource "" ($resources | default dict))) -}}
          {{- $problems = append $problems (printf "%s.autoscaling: %d percent of what? Write %s.requests.%s" $path (int $target) $at $resource) -}}
        {{- end -}}
      {{- end -}}
    {{- end -}}
    {{- if not (or $scaling.metrics $scaling.targetCPUUtilizationPercentage $scaling.targetMemoryUtilizationPercentage) -}}
      {{- $problems = append $problems (printf "%s.autoscaling: by what? Write a target or metrics" $path) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- toJson $problems -}}
{{- end -}}

{{- /* Resources of all containers of the pods that are scaled, by path: dict "root" $ "path" PATH. */ -}}
{{- define "warmroute.scaledResources" -}}
{{- $router := .root.Values.router -}}
{{- $found := dict -}}
{{- if eq .path "router.epp" -}}
  {{- $_ := set $found "router.epp.resources" $router.epp.resources -}}
  {{- if include "warmroute.sidecar" .root }}{{ $_ := set $found "router.proxy.resources" $router.proxy.resources }}{{ end -}}
  {{- if $router.tokenizer.enabled }}{{ $_ := set $found "router.tokenizer.resources" $router.tokenizer.resources }}{{ end -}}
{{- else if include "warmroute.proxyService" .root -}}
  {{- $_ := set $found "router.proxy.resources" $router.proxy.resources -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- /* Two that listen on one port of the pod. */ -}}
{{- define "warmroute.problems.ports" -}}
{{- $router := .Values.router -}}
{{- $flags := $router.epp.flags | default dict -}}
{{- $ports := list (list "router.epp.flags.admin-port" (dig "admin-port" 9091 $flags)) -}}
{{- if include "warmroute.sidecar" . -}}
  {{- $ports = concat (list (list "the proxy" 8081) (list "the proxy" 19000) (list "the proxy" 19001)) $ports -}}
{{- end -}}
{{- $ports = concat $ports (list
  (list "router.epp.extProcPort" $router.epp.extProcPort)
  (list "router.epp.grpcHealthPort" $router.epp.grpcHealthPort)
  (list "router.metricsPort" $router.metricsPort)) -}}
{{- if $router.tokenizer.enabled -}}
  {{- $ports = append $ports (list "router.tokenizer.port" $router.tokenizer.port) -}}
{{- end -}}
{{- range $router.epp.extraContainerPorts -}}
  {{- $ports = append $ports (list "router.epp.extraContainerPorts" .containerPort) -}}
{{- end -}}
{{- $problems := list -}}
{{- $seen := dict -}}
{{- range $ports -}}
  {{- $port := last . | int | toString -}}
  {{- if and (hasKey $seen $port) (ne $port "0") -}}
    {{- $problems = append $problems (printf "%s: %s has port %s of the pod already; write another" (first .) (get $seen $port) $port) -}}
  {{- else -}}
    {{- $_ := set $seen $port (first .) -}}
  {{- end -}}
{{- end -}}
{{- toJson $problems -}}
{{- end -}}

{{- /* Values that others leave without effect. */ -}}
{{- define "warmroute.problems.idle" -}}
{{- $problems := list -}}
{{- $router := .Values.router -}}
{{- if and $router.epp.tls.secretName (not (include "warmroute.secure" .)) -}}
  {{- $problems = append $problems "router.epp.tls.secretName: flags.secure-serving is false, so no certificate is shown; leave out one of them" -}}
{{- end -}}
{{- if and $router.monitoring.prometheus.tlsConfig (not (hasKey ($router.epp.flags | default dict) "metrics-cert-dir")) -}}
  {{- $problems = append $problems "router.monitoring.prometheus.tlsConfig: metrics are not served over TLS; write router.epp.flags.metrics-cert-dir, or leave it out" -}}
{{- end -}}
{{- if and $router.legacyPolicies (not $router.inferencePool.create) -}}
  {{- $problems = append $problems "router.legacyPolicies: objectives and rewrites belong to a pool; set router.inferencePool.create: true, or leave it out" -}}
{{- end -}}
{{- toJson $problems -}}
{{- end -}}

{{- /* What Envoy Gateway cannot do, and what would have no effect there. */ -}}
{{- define "warmroute.problems.envoyGateway" -}}
{{- $problems := list -}}
{{- $router := .Values.router -}}
{{- $own := .Values.provider.envoyGateway -}}
{{- if eq .Values.provider.name "envoy-gateway" -}}
  {{- if eq .Values.mode "standalone" -}}
    {{- $problems = append $problems "provider.name: envoy-gateway has no part in mode standalone; write mode: gateway, or leave it out" -}}
  {{- end -}}
  {{- if and $own.failOpen (eq $router.inferencePool.failureMode "FailClose") -}}
    {{- $problems = append $problems "provider.envoyGateway.failOpen: router.inferencePool.failureMode is FailClose; leave out one of them" -}}
  {{- end -}}
  {{- if $own.tls.caConfigMap -}}
    {{- if not (include "warmroute.secure" .) -}}
      {{- $problems = append $problems "provider.envoyGateway.tls.caConfigMap: flags.secure-serving is false, so there is no certificate to verify; leave out one of them" -}}
    {{- else if not $router.epp.tls.secretName -}}
      {{- $problems = append $problems "provider.envoyGateway.tls.caConfigMap: each picker signs its own certificate, which nobody can verify; write router.epp.tls.secretName, or leave it out" -}}
    {{- end -}}
  {{- else if $own.tls.hostname -}}
    {{- $problems = append $problems "provider.envoyGateway.tls.hostname: no certificate is verified; write provider.envoyGateway.tls.caConfigMap, or leave it out" -}}
  {{- end -}}
  {{- if and $own.clientTrafficPolicy.spec (not $own.clientTrafficPolicy.create) -}}
    {{- $problems = append $problems "provider.envoyGateway.clientTrafficPolicy.spec: none is made; set provider.envoyGateway.clientTrafficPolicy.create: true, or leave it out" -}}
  {{- end -}}
{{- end -}}
{{- toJson $problems -}}
{{- end -}}
