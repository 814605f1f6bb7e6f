{{- /* Envoy's container: dict "root" $ "grace" SECONDS. */ -}}
{{- define "warmroute.proxyContainer" -}}
{{- $proxy := .root.Values.router.proxy -}}
name: envoy
image: {{ $proxy.image | quote }}
imagePullPolicy: {{ $proxy.imagePullPolicy }}
args:
- --config-path
- /etc/envoy/envoy.yaml
- --log-level
- warning
- --disable-hot-restart
{{- range $proxy.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- with $proxy.env }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
- name: http
  containerPort: 8081
- name: proxy-ready
  containerPort: 19001
readinessProbe:
  httpGet:
    path: /ready
    port: proxy-ready
  periodSeconds: 2
# Envoy ends at once when told to. Until then it serves those who still come, and answers in flight go on.
lifecycle:
  {{- include "warmroute.servesOn" .grace | nindent 2 }}
{{- with $proxy.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $proxy.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
- name: envoy
  mountPath: /etc/envoy
  readOnly: true
{{- end -}}

{{- /* Before SIGTERM, as long as that leaves ten seconds: SECONDS of grace. */ -}}
{{- define "warmroute.servesOn" -}}
preStop:
  sleep:
    seconds: {{ max 1 (sub (int .) 10) }}
{{- end -}}

{{- define "warmroute.proxyVolume" -}}
name: envoy
configMap:
  name: {{ include "warmroute.proxyName" . }}
{{- end -}}

{{- define "warmroute.enginesService" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "warmroute.enginesName" . }}
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "warmroute.labels" . | nindent 4 }}
spec:
  clusterIP: None
  selector:
    {{- toYaml .Values.router.modelServers.matchLabels | nindent 4 }}
  ports:
  {{- range .Values.router.modelServers.targetPorts }}
  - name: port-{{ int .number }}
    port: {{ int .number }}
    {{- if eq $.Values.router.modelServers.protocol "grpc" }}
    appProtocol: kubernetes.io/h2c
    {{- end }}
  {{- end }}
{{- end -}}
