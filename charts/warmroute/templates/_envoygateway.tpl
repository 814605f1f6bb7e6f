{{- /* What the values may change of Envoy Gateway's policies. */ -}}

{{- define "warmroute.envoyGateway.traffic" -}}
targetRefs:
- group: gateway.networking.k8s.io
  kind: HTTPRoute
  name: {{ .Release.Name }}
# The endpoint that the picker named, or the next of its list. Where none of them is an endpoint of the Service (any
# more), any endpoint.
loadBalancer:
  type: LeastRequest
  endpointOverride:
    extractFrom:
    - header: x-gateway-destination-endpoint
# An engine that just died refuses the connection; nothing was sent, so another may take it.
retry:
  numRetries: 3
  retryOn:
    triggers:
    - connect-failure
# Answers take as long as the route lets them. vLLM closes a connection that was idle for 5 s; a request that meets it
# there is lost, so ours go first.
timeout:
  http:
    requestTimeout: 0s
    streamIdleTimeout: 24h
    connectionIdleTimeout: 4s
{{- end -}}

{{- define "warmroute.envoyGateway.clients" -}}
targetRefs:
- group: gateway.networking.k8s.io
  kind: Gateway
  name: {{ .Values.httpRoute.inferenceGatewayName }}
{{- if .Values.provider.envoyGateway.failOpen }}
# What is held of a prompt until the picker is asked; 32 KiB by default.
connection:
  bufferLimit: 32Mi
{{- end }}
headers:
  # A client's id of a request is the one in the picker's log and decisions.
  requestID: PreserveOrGenerate
  # What only a picker may say is taken from requests before anything reads it.
  earlyRequestHeaders:
    remove:
    - x-gateway-destination-endpoint
    - x-gateway-destination-endpoint-served
    - x-gateway-destination-endpoint-subset
    - x-gateway-destination-endpoint-scores
    - x-gateway-destination-endpoint-fallback
    - x-prefiller-host-port
    - x-encoder-hosts-ports
    - x-data-parallel-host-port
    - x-kv-cache-source-host-port
{{- end -}}
