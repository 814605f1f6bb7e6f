{{- /* Names are at most 63 characters, and two releases never share one: what is cut off or replaced comes back as a digest. */ -}}
{{- define "warmroute.base" -}}
{{- $plain := .Release.Name | replace "." "-" -}}
{{- if and (eq $plain .Release.Name) (le (len $plain) 40) -}}
{{- $plain -}}
{{- else -}}
{{- printf "%s-%s" ($plain | trunc 31 | trimSuffix "-") (.Release.Name | sha256sum | trunc 8) -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.name" -}}
{{ include "warmroute.base" . }}-epp
{{- end -}}

{{- define "warmroute.proxyName" -}}
{{ include "warmroute.base" . }}-proxy
{{- end -}}

{{- /* Headless: each picker by its own address, for proxies that check each one's health. */ -}}
{{- define "warmroute.pickersName" -}}
{{ include "warmroute.base" . }}-epp-pods
{{- end -}}

{{- /* Headless: the engines, for proxies that know no pool. */ -}}
{{- define "warmroute.enginesName" -}}
{{ include "warmroute.base" . }}-engines
{{- end -}}

{{- /* A Gateway's namespace has policies of releases of other namespaces too. */ -}}
{{- define "warmroute.clientPolicyName" -}}
{{- $route := .Values.httpRoute -}}
{{- if has $route.inferenceGatewayNamespace (list "" .Release.Namespace) -}}
{{- include "warmroute.name" . -}}
{{- else -}}
{{- include "warmroute.clusterBase" . -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.readerName" -}}
{{ include "warmroute.name" . }}-metrics-reader
{{- end -}}

{{- define "warmroute.readerSecret" -}}
{{ .Values.router.monitoring.prometheus.auth.secretName | default (include "warmroute.readerName" .) }}
{{- end -}}

{{- /* Of what has no namespace. */ -}}
{{- define "warmroute.clusterBase" -}}
{{- $digest := printf "%s/%s" .Release.Namespace .Release.Name | sha256sum | trunc 8 -}}
{{- printf "%s-%s-%s" (include "warmroute.base" . | trunc 18 | trimSuffix "-") (.Release.Namespace | trunc 18 | trimSuffix "-") $digest -}}
{{- end -}}

{{- /* What the picker calls its pool: without a pool, its Deployment. */ -}}
{{- define "warmroute.poolName" -}}
{{- if .Values.router.inferencePool.create }}{{ .Release.Name }}{{ else }}{{ include "warmroute.name" . }}{{ end -}}
{{- end -}}

{{- /* The lease of the picker's replicas; its name is never near the limit of 253 characters here. */ -}}
{{- define "warmroute.leaseName" -}}
{{- printf "epp-%s-%s.llm-d.ai" .Release.Namespace (include "warmroute.poolName" .) -}}
{{- end -}}

{{- define "warmroute.serviceHost" -}}
{{- printf "%s.%s.svc.%s" .name .root.Release.Namespace .root.Values.router.clusterDomain -}}
{{- end -}}

{{- define "warmroute.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
llm-d.ai/igw-mode: llm-d-router-{{ .Values.mode }}
{{- end -}}

{{- define "warmroute.pickerSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: endpoint-picker
{{- end -}}

{{- define "warmroute.proxySelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: proxy
{{- end -}}

{{- define "warmroute.image" -}}
{{- with .registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .repository }}:{{ .tag -}}
{{- end -}}
