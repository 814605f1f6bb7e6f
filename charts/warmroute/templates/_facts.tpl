{{- /* What follows from the values. Conditions are "true" or nothing. */ -}}

{{- /* A boolean flag: dict "root" $ "flag" NAME "default" BOOL. */ -}}
{{- define "warmroute.flagOn" -}}
{{- $value := dig .flag .default (.root.Values.router.epp.flags | default dict) -}}
{{- if has (toString $value) (list "true" "True" "TRUE" "t" "T" "1") }}true{{ end -}}
{{- end -}}

{{- define "warmroute.secure" -}}
{{- include "warmroute.flagOn" (dict "root" . "flag" "secure-serving" "default" true) -}}
{{- end -}}

{{- /* Only the leader is ready. */ -}}
{{- define "warmroute.leader" -}}
{{- include "warmroute.flagOn" (dict "root" . "flag" "ha-enable-leader-election" "default" false) -}}
{{- end -}}

{{- define "warmroute.proxied" -}}
{{- if and (eq .Values.mode "standalone") .Values.router.proxy.enabled }}true{{ end -}}
{{- end -}}

{{- define "warmroute.sidecar" -}}
{{- if and (include "warmroute.proxied" .) (eq .Values.router.proxy.mode "sidecar") }}true{{ end -}}
{{- end -}}

{{- define "warmroute.proxyService" -}}
{{- if and (include "warmroute.proxied" .) (eq .Values.router.proxy.mode "service") }}true{{ end -}}
{{- end -}}

{{- define "warmroute.envoyGateway" -}}
{{- if and (eq .Values.mode "gateway") (eq .Values.provider.name "envoy-gateway") }}true{{ end -}}
{{- end -}}

{{- /* What is between Envoy Gateway's proxies and the picker: none, verified or unverified TLS. */ -}}
{{- define "warmroute.envoyGatewayTls" -}}
{{- if not (include "warmroute.secure" .) }}none
{{- else if .Values.provider.envoyGateway.tls.caConfigMap }}verified
{{- else }}unverified
{{- end -}}
{{- end -}}

{{- /* A picker that its own proxy alone asks ends with that. A leader does not wait: others wait for its lease. */ -}}
{{- define "warmroute.goesWithProxy" -}}
{{- if and (include "warmroute.sidecar" .) (not (include "warmroute.leader" .)) }}true{{ end -}}
{{- end -}}

{{- /* For how long a picker serves new requests after SIGTERM, as the flag writes it. */ -}}
{{- define "warmroute.drainTimeout" -}}
{{- dig "drain-timeout" (ternary "1s" "30s" (eq (include "warmroute.goesWithProxy" .) "true")) (.Values.router.epp.flags | default dict) -}}
{{- end -}}

{{- /* There are replicas of which one writes conditions, or is ready alone. */ -}}
{{- define "warmroute.lease" -}}
{{- if or .Values.router.inferencePool.create (include "warmroute.leader" .) }}true{{ end -}}
{{- end -}}

{{- define "warmroute.metricsAuth" -}}
{{- if .Values.router.monitoring.prometheus.auth.enabled }}true{{ end -}}
{{- end -}}

{{- /* The chart's own payload-agnostic.yaml is in use. One of its plugins is experimental. */ -}}
{{- define "warmroute.agnostic" -}}
{{- $epp := .Values.router.epp -}}
{{- $own := or $epp.pluginsConfig (hasKey ($epp.pluginsCustomConfig | default dict) $epp.pluginsConfigFile) -}}
{{- if and (eq $epp.pluginsConfigFile "payload-agnostic.yaml") (not $own) }}true{{ end -}}
{{- end -}}

{{- /* On which port of the Service requests come in. */ -}}
{{- define "warmroute.httpPort" -}}
{{- $port := 8081 -}}
{{- range .Values.router.extraServicePorts }}{{ if eq .name "http" }}{{ $port = .port | int }}{{ end }}{{ end -}}
{{- $port -}}
{{- end -}}

{{- define "warmroute.healthPath" -}}
{{- if hasPrefix "triton" .Values.router.modelServers.type }}/v2/health/ready{{ else }}/health{{ end -}}
{{- end -}}

{{- /* Seconds of a duration as flags write it, whole ones. */ -}}
{{- define "warmroute.seconds" -}}
{{- $seconds := 0.0 -}}
{{- range regexFindAll "[0-9.]+(h|ms|m|s)" (toString .) -1 -}}
  {{- $amount := regexFind "[0-9.]+" . | float64 -}}
  {{- $unit := regexFind "[a-z]+" . -}}
  {{- $seconds = addf $seconds (mulf $amount (get (dict "h" 3600.0 "m" 60.0 "s" 1.0 "ms" 0.001) $unit)) -}}
{{- end -}}
{{- $seconds | ceil | int -}}
{{- end -}}

{{- /* As an argument: whole numbers as such, whatever their size. */ -}}
{{- define "warmroute.text" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end -}}

{{- define "warmroute.args" -}}
{{- $flags := .Values.router.epp.flags | default dict -}}
{{- $args := list (printf "--pool-namespace=%s" .Release.Namespace) -}}
{{- if .Values.router.inferencePool.create -}}
  {{- $args = concat $args (list (printf "--pool-name=%s" (include "warmroute.poolName" .)) "--pool-group=inference.networking.k8s.io") -}}
{{- else -}}
  {{- $labels := list -}}
  {{- range $key, $value := .Values.router.modelServers.matchLabels }}{{ $labels = append $labels (printf "%s=%s" $key $value) }}{{ end -}}
  {{- $ports := list -}}
  {{- range .Values.router.modelServers.targetPorts }}{{ $ports = append $ports (.number | int | toString) }}{{ end -}}
  {{- $args = concat $args (list (printf "--endpoint-selector=%s" (join "," $labels)) (printf "--endpoint-target-ports=%s" (join "," $ports))) -}}
{{- end -}}
{{- $args = concat $args (list
  (printf "--config-file=/config/%s" .Values.router.epp.pluginsConfigFile)
  (printf "--grpc-port=%d" (int .Values.router.epp.extProcPort))
  (printf "--grpc-health-port=%d" (int .Values.router.epp.grpcHealthPort))
  (printf "--metrics-port=%d" (int .Values.router.metricsPort))
  (printf "--metrics-endpoint-auth=%t" .Values.router.monitoring.prometheus.auth.enabled)
  (printf "--tracing=%t" .Values.router.tracing.enabled)) -}}
{{- if .Values.router.epp.tls.secretName -}}
  {{- $args = concat $args (list "--cert-path=/certs" "--enable-cert-reload=true") -}}
{{- end -}}
{{- if and (include "warmroute.agnostic" .) (not (hasKey $flags "allow-experimental-plugins")) -}}
  {{- $args = append $args "--allow-experimental-plugins=true" -}}
{{- end -}}
{{- if and (include "warmroute.goesWithProxy" .) (not (hasKey $flags "drain-timeout")) -}}
  {{- $args = append $args (printf "--drain-timeout=%s" (include "warmroute.drainTimeout" .)) -}}
{{- end -}}
{{- if not (hasKey $flags "zap-encoder") }}{{ $args = append $args "--zap-encoder=json" }}{{ end -}}
{{- range $flag, $value := $flags -}}
  {{- $args = append $args (printf "--%s=%s" $flag (include "warmroute.text" $value)) -}}
{{- end -}}
{{- toYaml $args -}}
{{- end -}}

{{- /* Constraints with the selector of the pods, where they have none: dict "constraints" LIST "selector" TEXT. */ -}}
{{- define "warmroute.spread" -}}
{{- $ours := dict "labelSelector" (dict "matchLabels" (fromYaml .selector)) -}}
{{- $constraints := list -}}
{{- range .constraints }}{{ $constraints = append $constraints (merge (dict) . $ours) }}{{ end -}}
{{- toYaml $constraints -}}
{{- end -}}

{{- define "warmroute.envoy.engines" -}}
{{- $host := include "warmroute.serviceHost" (dict "root" . "name" (include "warmroute.enginesName" .)) -}}
{{- $endpoints := list -}}
{{- range .Values.router.modelServers.targetPorts -}}
  {{- $endpoints = append $endpoints (dict "endpoint" (dict "address" (dict "socket_address" (dict "address" $host "port_value" (int .number))))) -}}
{{- end -}}
{{- toJson $endpoints -}}
{{- end -}}

{{- define "warmroute.envoy.pickers" -}}
{{- $host := "127.0.0.1" -}}
{{- if include "warmroute.proxyService" . -}}
  {{- $host = include "warmroute.serviceHost" (dict "root" . "name" (include "warmroute.pickersName" .)) -}}
{{- end -}}
{{- $address := dict "socket_address" (dict "address" $host "port_value" (int .Values.router.epp.extProcPort)) -}}
{{- $health := dict "port_value" (int .Values.router.epp.grpcHealthPort) -}}
{{- list (dict "endpoint" (dict "address" $address "health_check_config" $health)) | toJson -}}
{{- end -}}
