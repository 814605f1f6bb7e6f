{{- /* The configuration files: name -> text, as YAML. Those given as objects are written as JSON, which is YAML too. */ -}}
{{- define "warmroute.configFiles" -}}
{{- $files := dict
  "default-plugins.yaml" (include "warmroute.config.default" .)
  "payload-agnostic.yaml" (include "warmroute.config.agnostic" .) -}}
{{- range $name, $content := .Values.router.epp.pluginsCustomConfig -}}
  {{- $_ := set $files $name (kindIs "string" $content | ternary $content (toPrettyJson $content)) -}}
{{- end -}}
{{- with .Values.router.epp.pluginsConfig -}}
  {{- $_ := set $files $.Values.router.epp.pluginsConfigFile (toPrettyJson .) -}}
{{- end -}}
{{- toYaml $files -}}
{{- end -}}

{{- define "warmroute.config.sources" -}}
{{- $source := .Values.router.epp.metricsDataSource -}}
{{- if not (and (eq $source.scheme "http") (eq $source.path "/metrics")) }}
- type: metrics-data-source
  parameters: {{ $source | toJson }}
{{- end }}
{{- if ne .Values.router.modelServers.type "vllm" }}
- type: core-metrics-extractor
  parameters: {defaultEngine: {{ .Values.router.modelServers.type }}}
{{- end }}
{{- end -}}

{{- define "warmroute.config.parsers" -}}
{{- $servers := .Values.router.modelServers -}}
{{- $parsers := .Values.router.epp.parsers -}}
{{- if not $parsers -}}
  {{- if and (eq $servers.type "vllm") (eq $servers.protocol "grpc") }}{{ $parsers = list "vllmgrpc-parser" }}{{ end -}}
  {{- if eq $servers.type "triton" }}{{ $parsers = list "passthrough-parser" }}{{ end -}}
{{- end -}}
{{- toJson ($parsers | default list) -}}
{{- end -}}

{{- define "warmroute.config.handler" -}}
{{- with . }}
requestHandler:
  parsers:
  {{- range . }}
  - pluginRef: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "warmroute.config.default" -}}
{{- $parsers := include "warmroute.config.parsers" . | fromJsonArray -}}
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
{{- if .Values.router.tokenizer.enabled }}
- type: token-producer
  parameters:
    modelName: {{ .Values.router.tokenizer.modelName | quote }}
    vllm: {url: {{ printf "http://127.0.0.1:%d" (int .Values.router.tokenizer.port) | quote }}}
{{- end }}
{{- include "warmroute.config.sources" . }}
{{- range $parsers }}
- type: {{ . }}
{{- end }}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
{{- include "warmroute.config.handler" $parsers }}
{{- end -}}

{{- /* For APIs that no parser reads: bodies pass unread, load and sessions choose. */ -}}
{{- define "warmroute.config.agnostic" -}}
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: passthrough-parser
- type: active-request-scorer
- type: session-affinity-scorer
{{- include "warmroute.config.sources" . }}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: active-request-scorer, weight: 1}
  - {pluginRef: session-affinity-scorer, weight: 1}
{{- include "warmroute.config.handler" (list "passthrough-parser") }}
{{- end -}}
