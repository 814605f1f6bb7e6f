{{- /* The picker's container. */ -}}
{{- define "warmroute.pickerContainer" -}}
{{- $epp := .Values.router.epp -}}
name: epp
image: {{ include "warmroute.image" (merge (dict "tag" ($epp.image.tag | default .Chart.AppVersion)) $epp.image) | quote }}
imagePullPolicy: {{ $epp.image.pullPolicy }}
command: [warmroute, serve]
args:
  {{- include "warmroute.args" . | nindent 2 }}
env:
- name: NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- if .Values.router.tracing.enabled }}
  {{- include "warmroute.tracingEnv" . | nindent 0 }}
{{- end }}
{{- with $epp.env }}
  {{- toYaml . | nindent 0 }}
{{- end }}
ports:
- name: grpc
  containerPort: {{ int $epp.extProcPort }}
- name: grpc-health
  containerPort: {{ int $epp.grpcHealthPort }}
- name: metrics
  containerPort: {{ int .Values.router.metricsPort }}
{{- with $epp.extraContainerPorts }}
  {{- toYaml . | nindent 0 }}
{{- end }}
# A process that runs is alive, leader or not and whatever the pool looks like.
livenessProbe:
  grpc:
    port: {{ int $epp.grpcHealthPort }}
    service: liveness
  initialDelaySeconds: 5
  periodSeconds: 10
  failureThreshold: 6
  # One that hangs has nothing to end in good order, and is not ready meanwhile.
  terminationGracePeriodSeconds: 10
readinessProbe:
  grpc:
    port: {{ int $epp.grpcHealthPort }}
    service: readiness
  periodSeconds: 2
{{- if include "warmroute.goesWithProxy" . }}
# The proxy beside it serves those who still come, and asks it until then.
lifecycle:
  {{- include "warmroute.servesOn" $epp.terminationGracePeriodSeconds | nindent 2 }}
{{- end }}
{{- with $epp.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $epp.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
# The folder, not the file: what is mounted by subPath does not follow changes.
- name: config
  mountPath: /config
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: service-account
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- if $epp.tls.secretName }}
- name: certs
  mountPath: /certs
  readOnly: true
{{- end }}
{{- with $epp.volumeMounts }}
  {{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{- define "warmroute.pickerVolumes" -}}
- name: config
  configMap:
    name: {{ include "warmroute.name" . }}
- name: tmp
  emptyDir: {}
# For the picker's container alone: a proxy beside it, which clients reach, has no token.
- name: service-account
  projected:
    sources:
    - serviceAccountToken:
        path: token
        expirationSeconds: 3607
    - configMap:
        name: kube-root-ca.crt
        items:
        - key: ca.crt
          path: ca.crt
    - downwardAPI:
        items:
        - path: namespace
          fieldRef:
            fieldPath: metadata.namespace
{{- with .Values.router.epp.tls.secretName }}
- name: certs
  secret:
    secretName: {{ . }}
{{- end }}
{{- if include "warmroute.sidecar" . }}
- {{ include "warmroute.proxyVolume" . | nindent 2 | trim }}
{{- end }}
{{- if .Values.router.tokenizer.enabled }}
- name: model-cache
  emptyDir: {}
{{- with .Values.router.tokenizer.volumes }}
  {{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}
{{- with .Values.router.epp.volumes }}
  {{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{- define "warmroute.tracingEnv" -}}
{{- $tracing := .Values.router.tracing -}}
- name: OTEL_SERVICE_NAME
  value: warmroute
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ $tracing.otelExporterEndpoint | quote }}
- name: OTEL_TRACES_EXPORTER
  value: otlp
- name: OTEL_TRACES_SAMPLER
  value: {{ $tracing.sampling.sampler }}
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ $tracing.sampling.samplerArg | quote }}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name=$(NAMESPACE),k8s.node.name=$(NODE_NAME),k8s.pod.name=$(POD_NAME)
{{- end -}}
