package main

import (
	"bytes"
	"fmt"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Kinds of reply: fields of ProcessingResponse.
const (
	requestHeadersReply  = 1
	responseHeadersReply = 2
	requestBodyReply     = 3
	responseBodyReply    = 4
	modeOverrideField    = 9
)

// Where a streamed body lies: BodyResponse.response, CommonResponse.body_mutation, BodyMutation.streamed_response.
var streamedBodyPath = [...]protowire.Number{1, 3, 3}

// kindOf is the one kind of a reply, and the submessage of that kind.
func kindOf(reply []byte) (protowire.Number, []byte, error) {
	var kind protowire.Number
	var inside []byte
	for rest := reply; len(rest) > 0; {
		number, wire, n := protowire.ConsumeTag(rest)
		if n < 0 {
			return 0, nil, protowire.ParseError(n)
		}
		size := protowire.ConsumeFieldValue(number, wire, rest[n:])
		if size < 0 {
			return 0, nil, protowire.ParseError(size)
		}
		if number < modeOverrideField && number != metadataField {
			if kind != 0 {
				return 0, nil, fmt.Errorf("a reply is of two kinds, %d and %d", kind, number)
			}
			kind = number
			inside, _ = protowire.ConsumeBytes(rest[n:])
		}
		rest = rest[n+size:]
	}
	return kind, inside, nil
}

// destinationOf is the endpoint that a reply to request headers names, in its header and in its metadata.
func destinationOf(reply []byte) (string, error) {
	var message extproc.ProcessingResponse
	if err := proto.Unmarshal(reply, &message); err != nil {
		return "", err
	}
	headers := message.GetRequestHeaders()
	if headers == nil {
		return "", fmt.Errorf("request headers were answered by %.200s", &message)
	}
	named := ""
	for _, option := range headers.GetResponse().GetHeaderMutation().GetSetHeaders() {
		if option.GetHeader().GetKey() == destination {
			named = valueOf(option.GetHeader())
		}
	}
	metadata := message.GetDynamicMetadata().GetFields()[namespace].GetStructValue().GetFields()[destination]
	if named == "" || named != metadata.GetStringValue() {
		return "", fmt.Errorf("the header says %q, the metadata %q", named, metadata.GetStringValue())
	}
	return named, nil
}

func valueOf(header *core.HeaderValue) string {
	if len(header.GetRawValue()) > 0 {
		return string(header.GetRawValue())
	}
	return header.GetValue()
}

// streamedBody is the body in a reply of `wanted` kind, and whether it is the last.
func streamedBody(reply []byte, wanted protowire.Number) (body []byte, end bool, err error) {
	kind, inside, err := kindOf(reply)
	if err != nil {
		return nil, false, err
	}
	if kind != wanted {
		return nil, false, fmt.Errorf("a reply of kind %d came in place of %d: %.80q", kind, wanted, reply)
	}
	for _, field := range streamedBodyPath {
		if inside, err = only(inside, field); err != nil {
			return nil, false, err
		}
	}
	for len(inside) > 0 {
		number, wire, n := protowire.ConsumeTag(inside)
		switch {
		case n < 0:
			return nil, false, protowire.ParseError(n)
		case number == 1 && wire == protowire.BytesType:
			value, size := protowire.ConsumeBytes(inside[n:])
			if size < 0 {
				return nil, false, protowire.ParseError(size)
			}
			body, inside = value, inside[n+size:]
		case number == 2 && wire == protowire.VarintType:
			value, size := protowire.ConsumeVarint(inside[n:])
			if size < 0 {
				return nil, false, protowire.ParseError(size)
			}
			end, inside = value != 0, inside[n+size:]
		default:
			return nil, false, fmt.Errorf("a streamed body has a field %d", number)
		}
	}
	return body, end, nil
}

// only is the value of `field`, which must be all there is.
func only(message []byte, field protowire.Number) ([]byte, error) {
	number, wire, n := protowire.ConsumeTag(message)
	if n < 0 || number != field || wire != protowire.BytesType {
		return nil, fmt.Errorf("field %d expected, got %.80q", field, message)
	}
	value, size := protowire.ConsumeBytes(message[n:])
	if size < 0 || n+size != len(message) {
		return nil, fmt.Errorf("field %d expected and nothing else, got %.80q", field, message)
	}
	return value, nil
}

// same is nil where `got` continues `want` at `at`.
func same(got, want []byte, at int) error {
	if at+len(got) > len(want) || !bytes.Equal(got, want[at:at+len(got)]) {
		return fmt.Errorf("the body differs from what was sent, at byte %d of %d", at, len(want))
	}
	return nil
}
