// Anchor is what a Go endpoint picker pays for its transport at best: grpc-go with generated messages, a decision
// that decodes the body and takes one of eight endpoints by a checksum, and nothing else. What the other servers
// cost is told as a share of it.
package main

import (
	"crypto/tls"
	"encoding/json"
	"flag"
	"fmt"
	"hash/crc32"
	"io"
	"log"
	"net"
	"path/filepath"
	"strconv"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"
)

const (
	destination  = "x-gateway-destination-endpoint"
	endpoints    = 8
	keyBytes     = 64
	pieceBytes   = 62_000
	messageBytes = 64 << 20
)

type picker struct {
	extproc.UnimplementedExternalProcessorServer
	burn time.Duration
}

// Process answers one stream, message by message.
func (p picker) Process(stream extproc.ExternalProcessor_ProcessServer) error {
	headers := make(map[string]string)
	var body []byte
	for {
		message, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		switch request := message.Request.(type) {
		case *extproc.ProcessingRequest_RequestHeaders:
			for _, header := range request.RequestHeaders.GetHeaders().GetHeaders() {
				headers[header.Key] = string(header.RawValue)
			}
		case *extproc.ProcessingRequest_RequestBody:
			body = append(body, request.RequestBody.Body...)
			if request.RequestBody.EndOfStream {
				err = p.place(stream, headers, body)
			}
		case *extproc.ProcessingRequest_ResponseHeaders:
			err = stream.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseHeaders{
				ResponseHeaders: &extproc.HeadersResponse{Response: &extproc.CommonResponse{
					HeaderMutation: set("x-went-into-resp-headers", "true")}}}})
		case *extproc.ProcessingRequest_ResponseBody:
			err = stream.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseBody{
				ResponseBody: piece(request.ResponseBody.Body, request.ResponseBody.EndOfStream)}})
		default:
			err = status.Errorf(codes.Unimplemented, "the anchor does not answer %T", request)
		}
		if err != nil {
			return err
		}
	}
}

// place sends the choice, then the body as it came.
func (p picker) place(stream extproc.ExternalProcessor_ProcessServer, headers map[string]string, body []byte) error {
	chosen, err := p.choose(headers["x-session-id"], body)
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	metadata, err := structpb.NewStruct(map[string]any{"envoy.lb": map[string]any{destination: chosen}})
	if err != nil {
		return err
	}
	err = stream.Send(&extproc.ProcessingResponse{
		DynamicMetadata: metadata,
		Response: &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: &extproc.HeadersResponse{
			Response: &extproc.CommonResponse{
				ClearRouteCache: true,
				HeaderMutation:  set(destination, chosen, "content-length", strconv.Itoa(len(body)))}}}})
	for at := 0; err == nil && (at == 0 || at < len(body)); at += pieceBytes {
		end := min(at+pieceBytes, len(body))
		err = stream.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestBody{
			RequestBody: piece(body[at:end], end == len(body))}})
	}
	return err
}

func (p picker) choose(session string, body []byte) (string, error) {
	for end := time.Now().Add(p.burn); p.burn > 0 && time.Now().Before(end); {
	}
	var request map[string]any
	if err := json.Unmarshal(body, &request); err != nil {
		return "", fmt.Errorf("the body is not JSON: %w", err)
	}
	messages, _ := request["messages"].([]any)
	if len(messages) == 0 {
		return "", fmt.Errorf("the body has no messages")
	}
	last, _ := messages[len(messages)-1].(map[string]any)
	content, _ := last["content"].(string)
	key := session + content[:min(keyBytes, len(content))]
	return fmt.Sprintf("10.0.0.%d:8000", 1+crc32.ChecksumIEEE([]byte(key))%endpoints), nil
}

func set(pairs ...string) *extproc.HeaderMutation {
	mutation := &extproc.HeaderMutation{}
	for i := 0; i < len(pairs); i += 2 {
		mutation.SetHeaders = append(mutation.SetHeaders, &core.HeaderValueOption{
			Header:       &core.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])},
			AppendAction: core.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD})
	}
	return mutation
}

func piece(body []byte, end bool) *extproc.BodyResponse {
	return &extproc.BodyResponse{Response: &extproc.CommonResponse{BodyMutation: &extproc.BodyMutation{
		Mutation: &extproc.BodyMutation_StreamedResponse{
			StreamedResponse: &extproc.StreamedBodyResponse{Body: body, EndOfStream: end}}}}}
}

func main() {
	certificates := flag.String("cert-path", "", "folder with tls.crt and tls.key: serve TLS")
	burnMs := flag.Float64("decide-ms", 0, "CPU milliseconds that every decision burns besides")
	flag.Parse()
	options := []grpc.ServerOption{grpc.MaxRecvMsgSize(messageBytes), grpc.MaxSendMsgSize(messageBytes)}
	if *certificates != "" {
		pair, err := tls.LoadX509KeyPair(
			filepath.Join(*certificates, "tls.crt"), filepath.Join(*certificates, "tls.key"))
		if err != nil {
			log.Fatal(err)
		}
		options = append(options, grpc.Creds(credentials.NewServerTLSFromCert(&pair)))
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer(options...)
	burn := time.Duration(*burnMs * float64(time.Millisecond))
	extproc.RegisterExternalProcessorServer(server, picker{burn: burn})
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	log.Fatal(server.Serve(listener))
}
