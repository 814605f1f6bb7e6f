package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

const (
	model         = "meta-llama/Llama-3.1-8B-Instruct"
	pieceBytes    = 1 << 16 // largest part of a body that Envoy sends in one message
	systemPrompts = 20
	wordChunks    = 100
	destination   = "x-gateway-destination-endpoint"
	served        = "x-gateway-destination-endpoint-served"
	namespace     = "envoy.lb"

	// Fields of ProcessingRequest. Go's encoder writes a oneof last, Envoy's writes fields in order, so whole
	// messages are put together here.
	requestHeadersField  = 2
	responseHeadersField = 3
	requestBodyField     = 4
	responseBodyField    = 5
	metadataField        = 8
	protocolConfigField  = 11
)

// question is one HTTP request: its body, and the framed messages that bring headers and body.
type question struct {
	body     []byte
	messages [][]byte
}

// answerPart is one body message of an answer, framed, and the bytes that must come back for it.
type answerPart struct {
	message []byte
	body    []byte
	end     bool
}

// questions are `count` requests with bodies of `bodyBytes`: one of twenty system prompts, then text of their own.
func questions(count, bodyBytes int) []question {
	draw := rand.New(rand.NewPCG(uint64(bodyBytes), 31))
	text := bodyBytes - len(chat("", ""))
	if text < 0 {
		text = 0
	}
	systems := make([]string, min(systemPrompts, count))
	for i := range systems {
		systems[i] = words(draw, text*3/4)
	}
	made := make([]question, count)
	for i := range made {
		body := chat(systems[i%len(systems)], words(draw, text-text*3/4))
		made[i] = question{body: body, messages: questionMessages(body, i)}
	}
	return made
}

func chat(system, user string) []byte {
	body, err := json.Marshal(map[string]any{
		"model":          model,
		"messages":       []map[string]string{{"role": "system", "content": system}, {"role": "user", "content": user}},
		"max_tokens":     wordChunks,
		"stream":         true,
		"stream_options": map[string]bool{"include_usage": true},
	})
	must(err)
	return body
}

func words(draw *rand.Rand, size int) string {
	var text strings.Builder
	for text.Len() < size {
		fmt.Fprintf(&text, "w%05x ", draw.Uint32()&0xfffff)
	}
	return text.String()[:size]
}

func questionMessages(body []byte, number int) [][]byte {
	headers := &extproc.HttpHeaders{Headers: headerMap(
		":authority", "gateway.example.com",
		":path", "/v1/chat/completions",
		":method", "POST",
		":scheme", "http",
		"user-agent", "OpenAI/Python 2.8.0",
		"accept", "application/json",
		"content-type", "application/json",
		"authorization", "Bearer sk-0000000000000000",
		"content-length", fmt.Sprint(len(body)),
		"x-forwarded-for", "10.0.0.7",
		"x-forwarded-proto", "http",
		"x-request-id", fmt.Sprintf("3f1c0e7c-95f0-4a0b-8e0f-%012d", number),
	)}
	config := &extproc.ProtocolConfiguration{RequestBodyMode: 4, ResponseBodyMode: 4} // FULL_DUPLEX_STREAMED
	first := part(part(nil, requestHeadersField, headers), protocolConfigField, config)
	messages := [][]byte{framed(first)}
	for at := 0; at < len(body); at += pieceBytes {
		end := min(at+pieceBytes, len(body))
		piece := &extproc.HttpBody{Body: body[at:end], EndOfStream: end == len(body)}
		messages = append(messages, framed(part(nil, requestBodyField, piece)))
	}
	return messages
}

// answerHeaders are those of an answer from `endpoint`, as framed message.
func answerHeaders(contentType, endpoint string) []byte {
	headers := &extproc.HttpHeaders{Headers: headerMap(
		":status", "200",
		"date", "Sun, 29 Nov 2026 21:18:11 GMT",
		"server", "uvicorn",
		"content-type", contentType,
		"x-envoy-upstream-service-time", "38",
	)}
	reported, err := structpb.NewStruct(map[string]any{served: endpoint})
	must(err)
	metadata := &core.Metadata{FilterMetadata: map[string]*structpb.Struct{namespace: reported}}
	return framed(part(part(nil, responseHeadersField, headers), metadataField, metadata))
}

// streamedAnswer has `chunks` events of vLLM's form: role, words, finish reason, usage, end; then the end of body.
func streamedAnswer(chunks int) []answerPart {
	head := `{"id":"chatcmpl-8ef2e257a6e3eb2d","object":"chat.completion.chunk","created":1795987091,"model":"` + model + `"`
	event := func(delta, finish string) string {
		return fmt.Sprintf(`data: %s,"choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s,"token_ids":null}]}`+
			"\n\n", head, delta, finish)
	}
	usage := `"usage":{"prompt_tokens":230,"total_tokens":326,"completion_tokens":96,"prompt_tokens_details":{"cached_tokens":176}}`
	texts := []string{event(`{"role":"assistant","content":""}`, "null")}
	for i := range max(chunks-4, 0) {
		texts = append(texts, event(fmt.Sprintf(`{"content":" word%d"}`, i), "null"))
	}
	texts = append(texts, event(`{"content":""}`, `"length"`),
		fmt.Sprintf("data: %s,\"choices\":[],%s}\n\n", head, usage), "data: [DONE]\n\n")
	var parts []answerPart
	for _, text := range texts {
		parts = append(parts, newAnswerPart([]byte(text), false))
	}
	return append(parts, newAnswerPart(nil, true))
}

// plainAnswer is an answer in one piece.
func plainAnswer() []answerPart {
	body := `{"id":"chatcmpl-8ef2e257a6e3eb2d","object":"chat.completion","created":1795987091,"model":"` + model +
		`","choices":[{"index":0,"message":{"role":"assistant","content":"` + strings.Repeat(" word", 32) +
		`","refusal":null,"tool_calls":[]},"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":230,` +
		`"total_tokens":262,"completion_tokens":32,"prompt_tokens_details":{"cached_tokens":176}}}`
	return []answerPart{newAnswerPart([]byte(body), false), newAnswerPart(nil, true)}
}

func newAnswerPart(body []byte, end bool) answerPart {
	return answerPart{framed(part(nil, responseBodyField, &extproc.HttpBody{Body: body, EndOfStream: end})), body, end}
}

// part appends one field that holds a message.
func part(to []byte, field protowire.Number, message proto.Message) []byte {
	encoded, err := proto.Marshal(message)
	must(err)
	return protowire.AppendBytes(protowire.AppendTag(to, field, protowire.BytesType), encoded)
}

// framed puts gRPC's prefix before a message: not compressed, length.
func framed(message []byte) []byte {
	n := len(message)
	return append([]byte{0, byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, message...)
}

func headerMap(pairs ...string) *core.HeaderMap {
	headers := &core.HeaderMap{}
	for i := 0; i < len(pairs); i += 2 {
		headers.Headers = append(headers.Headers, &core.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])})
	}
	return headers
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
