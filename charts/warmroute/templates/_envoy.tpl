{{- /* Written by tools/chart.py from epp/lab/envoy.yaml.in. */ -}}
{{- define "warmroute.envoy" -}}
# Two ways lead to the engines. With a picker, a request carries its destination in a header: a route that asks for
# the header sends it there. Without one (the picker is gone and `fail_open` holds) the header is missing, because a
# client's own was removed before the picker was asked, and the default route spreads over the healthy engines.
admin:
  address: {socket_address: {address: 127.0.0.1, port_value: 19000}}
static_resources:
  listeners:
  # For probes and for who reads metrics; the admin port itself stays on the loopback interface.
  - name: ready
    address: {socket_address: {address: {{ .Values.router.proxy.listenAddress | toJson }}, port_value: 19001}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
          stat_prefix: ready
          route_config:
            name: ready
            virtual_hosts:
            - name: admin
              domains: ["*"]
              routes:
              - match: {path: /ready}
                route: {cluster: admin}
              - match: {path: /stats/prometheus}
                route: {cluster: admin}
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  - name: gateway
    address: {socket_address: {address: {{ .Values.router.proxy.listenAddress | toJson }}, port_value: 8081}}
    per_connection_buffer_limit_bytes: 32768
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: gateway
          use_remote_address: true
          preserve_external_request_id: true
          normalize_path: true
          merge_slashes: true
          server_header_transformation: PASS_THROUGH
          http2_protocol_options: {max_concurrent_streams: 100, initial_stream_window_size: 65536, initial_connection_window_size: 1048576}
          # Before any filter and before the route is chosen: what only a picker may say.
          early_header_mutation_extensions:
          - name: envoy.http.early_header_mutation.header_mutation
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation
              mutations: [{"remove": "x-gateway-destination-endpoint"}, {"remove": "x-gateway-destination-endpoint-served"}, {"remove": "x-gateway-destination-endpoint-subset"}, {"remove": "x-gateway-destination-endpoint-scores"}, {"remove": "x-gateway-destination-endpoint-fallback"}, {"remove": "x-prefiller-host-port"}, {"remove": "x-encoder-hosts-ports"}, {"remove": "x-data-parallel-host-port"}, {"remove": "x-kv-cache-source-host-port"}]
          route_config:
            name: gateway
            virtual_hosts:
            - name: engines
              domains: ["*"]
              request_body_buffer_limit: 1048576
              # After every filter: what is said to the picker is no engine's business, asked or not.
              request_headers_to_remove: ["x-gateway-inference-fairness-id", "x-gateway-inference-objective", "x-gateway-model-name-rewrite", "x-llm-d-inference-fairness-id", "x-llm-d-inference-objective", "x-llm-d-model-name-rewrite", "x-llm-d-request-dropped-reason", "x-llm-d-slo-tpot-ms", "x-llm-d-slo-ttft-ms", "x-llm-d-video-duration-seconds", "x-llm-d-video-fps", "x-llm-d-video-resolution", "x-slo-tpot-ms", "x-slo-ttft-ms"]
              routes:
{{- if .Values.router.proxy.failOpen }}
              - match: {prefix: "/", headers: [{name: "x-gateway-destination-endpoint", present_match: true}]}
                route: {cluster: picked, timeout: 0s, idle_timeout: 86400s}
              - match: {prefix: "/"}
                route:
                  cluster: engines
                  timeout: 0s
                  idle_timeout: 86400s
                  # An engine that just died refuses the connection; nothing was sent, so another may take it.
                  retry_policy:
                    retry_on: connect-failure
                    num_retries: 3
                    host_selection_retry_max_attempts: 8
                    retry_host_predicate:
                    - name: envoy.retry_host_predicates.previous_hosts
                      typed_config: {"@type": type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate}
{{- end }}
{{- if not .Values.router.proxy.failOpen }}
              - match: {prefix: "/"}
                route: {cluster: picked, timeout: 0s, idle_timeout: 86400s}
{{- end }}
          http_filters:
          - name: envoy.filters.http.ext_proc
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              failure_mode_allow: {{ .Values.router.proxy.failOpen }}
              # Where no picker can be asked, or its stream breaks. Without this it is 500, which clients do not try again.
              status_on_error: {code: ServiceUnavailable}
              message_timeout: 1000s
              processing_mode: {"request_header_mode": "SEND", "response_header_mode": "SEND", "request_body_mode": "FULL_DUPLEX_STREAMED", "response_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND", "response_trailer_mode": "SEND"}
              grpc_service: {envoy_grpc: {cluster_name: picker, authority: picker}}
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
              suppress_envoy_headers: true
  clusters:
  - name: admin
    type: STATIC
    connect_timeout: 1s
    load_assignment:
      cluster_name: admin
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 19000}}}
  - name: picked
    type: ORIGINAL_DST
    connect_timeout: 5s
    lb_policy: CLUSTER_PROVIDED
    # vLLM closes a connection that was idle for 5 s. A request that meets it there is lost, so ours go first.
    typed_extension_protocol_options: &engine
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        common_http_protocol_options: {idle_timeout: 4s}
        explicit_http_config: {{ if (eq .Values.router.modelServers.protocol "grpc") }}{http2_protocol_options: {}}{{ else }}{http_protocol_options: {}}{{ end }}
    circuit_breakers: &unlimited {thresholds: [{max_connections: 40000, max_pending_requests: 40000, max_requests: 40000}]}
    original_dst_lb_config: {use_http_header: true, http_header_name: "x-gateway-destination-endpoint"}
{{- if .Values.router.proxy.failOpen }}
  - name: engines
    type: STRICT_DNS
    dns_lookup_family: V4_PREFERRED
    connect_timeout: 5s
    lb_policy: ROUND_ROBIN
    typed_extension_protocol_options: *engine
    circuit_breakers: *unlimited
    # Without panic: a dead engine stays out even where most are dead.
    common_lb_config: {healthy_panic_threshold: {value: 0}}
    health_checks:
    - timeout: 1s
      interval: "1.0s"
      no_traffic_interval: "1.0s"
      unhealthy_interval: "1.0s"
      unhealthy_threshold: 2
      healthy_threshold: 1
      {{- if (eq .Values.router.modelServers.protocol "grpc") }}
      tcp_health_check: {}
      {{- else }}
      http_health_check: {path: {{ include "warmroute.healthPath" . }}}
      {{- end }}
    load_assignment: {cluster_name: engines, endpoints: [{lb_endpoints: {{ include "warmroute.envoy.engines" . }}}]}
{{- end }}
  - name: picker
    {{- if (eq .Values.router.proxy.mode "service") }}
    type: STRICT_DNS
    dns_lookup_family: V4_PREFERRED
    {{- else }}
    type: STATIC
    {{- end }}
    connect_timeout: 5s
    lb_policy: LEAST_REQUEST
    circuit_breakers: *unlimited
    # Without panic: when no picker is well, a request is not handed to one, which is what lets it fail open.
    common_lb_config: {healthy_panic_threshold: {value: 0}}
    health_checks:
    - timeout: "1s"
      interval: "1.0s"
      no_traffic_interval: "1.0s"
      unhealthy_interval: "1.0s"
      unhealthy_threshold: 1
      healthy_threshold: 1
      grpc_health_check: {service_name: "envoy.service.ext_proc.v3.ExternalProcessor"}
{{- if (include "warmroute.secure" .) }}
      transport_socket_match_criteria: {purpose: health}
{{- end }}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {initial_stream_window_size: 65536, initial_connection_window_size: 1048576}}
{{- if (include "warmroute.secure" .) }}
    # A picker's certificate is its own; it is encrypted to, not verified. Separate health ports speak plain text.
    transport_socket_matches:
{{- end }}
{{- if (include "warmroute.secure" .) }}
    - name: health
      match: {purpose: health}
      transport_socket:
        name: envoy.transport_sockets.raw_buffer
        typed_config: {"@type": type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer}
{{- end }}
{{- if (include "warmroute.secure" .) }}
    - name: asking
      match: {}
      transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
          common_tls_context: {alpn_protocols: [h2], validation_context: {}}
{{- end }}
    load_assignment: {cluster_name: picker, endpoints: [{lb_endpoints: {{ include "warmroute.envoy.pickers" . }}}]}
{{- end -}}
