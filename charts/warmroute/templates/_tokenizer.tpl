{{- /* vLLM's render, beside the picker. Its caches are in a volume, since it is not root. */ -}}
{{- define "warmroute.tokenizerContainer" -}}
{{- $tokenizer := .Values.router.tokenizer -}}
name: vllm-render
image: {{ include "warmroute.image" $tokenizer.image | quote }}
imagePullPolicy: {{ $tokenizer.image.pullPolicy }}
command:
  {{- $tokenizer.command | default (eq $tokenizer.flavor "rust" | ternary (list "vllm-rs" "render") (list "vllm" "launch" "render")) | toYaml | nindent 2 }}
args:
  {{- $tokenizer.args | default (list $tokenizer.modelName (printf "--port=%d" (int $tokenizer.port))) | toYaml | nindent 2 }}
  {{- with $tokenizer.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $given := list -}}
{{- range $tokenizer.env }}{{ $given = append $given .name }}{{ end }}
env:
{{- range $name := list "HOME" "HF_HOME" }}
{{- if not (has $name $given) }}
- name: {{ $name }}
  value: /model-cache
{{- end }}
{{- end }}
{{- with $tokenizer.env }}
  {{- toYaml . | nindent 0 }}
{{- end }}
ports:
- name: render-http
  containerPort: {{ int $tokenizer.port }}
{{- with $tokenizer.readinessProbe }}
readinessProbe:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $tokenizer.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $tokenizer.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
- name: model-cache
  mountPath: /model-cache
{{- with $tokenizer.volumeMounts }}
  {{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}
